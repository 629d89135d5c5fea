"""The worker starts buckets in their order, whatever order gradients come in."""

from __future__ import annotations

import threading

import pytest
import torch
from buckets import recording_buckets

from horovod_sparse.rules import Step
from horovod_sparse.training.worker import Worker
from horovod_sparse.watchdog.report import Progress


@pytest.fixture
def parameters():
    return [torch.zeros(10) for _ in range(4)]


@pytest.fixture
def log():
    return []


@pytest.fixture
def worker(monkeypatch, parameters, log):
    """Two buckets of two parameters."""
    buckets, _ = recording_buckets(monkeypatch, log, parameters)
    return Worker(buckets, conditions=lambda _: lambda: Step(0.1), undoable=True)


def put(worker, p, **settings):
    return worker.put(p, torch.ones(10), **settings)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_buckets_run_in_their_order(worker, parameters, log, order):
    handles = [put(worker, parameters[i]) for i in order]
    assert all(torch.equal(handle(), torch.full((10,), 0.5)) for handle in handles)
    assert log == [(0, [0, 10], 0.1), (1, [0, 10], 0.1)]


def test_a_bucket_waits_for_the_one_before_it(worker, parameters, log):
    put(worker, parameters[2])
    put(worker, parameters[3])
    worker.finish()
    assert log == []


def test_a_parameter_left_out_is_not_waited_for(worker, parameters, log):
    worker.leave_out(parameters[0])
    put(worker, parameters[1])()
    assert log == [(0, [10], 0.1)]


def test_an_error_reaches_who_waits_and_the_next_step_starts_clean(worker, parameters, log):
    worker.buckets[0].pipeline.error = RuntimeError("the network is down")
    handles = [put(worker, p) for p in parameters]
    with pytest.raises(RuntimeError, match="down"):
        handles[0]()
    worker.finish()
    worker.buckets[0].pipeline.error = None
    handles = [put(worker, p) for p in parameters]
    assert all(torch.equal(handle(), torch.full((10,), 0.5)) for handle in handles)


def test_a_step_that_is_not_confirmed_is_undone_before_the_next(worker, parameters, log):
    for confirmed in (True, False, True):
        for handle in [put(worker, p) for p in parameters]:
            handle()
        worker.finish()
        if confirmed:
            worker.confirm()
    worker.settle()
    steps, undone = [[0, 10], [0, 10]], ["undone", "undone"]
    assert [event for _, event, *_ in log] == steps + steps + undone + steps


def test_only_the_buckets_that_were_exchanged_are_undone_and_once(worker, parameters, log):
    """One behind a bucket that failed still has the state of the step before."""
    worker.buckets[0].pipeline.error = RuntimeError("the network is down")
    for p in parameters:
        put(worker, p)
    worker.finish()
    worker.settle()
    worker.settle()
    assert log == [(0, [0, 10], 0.1), (0, "undone")]


def test_buckets_behind_one_that_failed_are_not_exchanged_in_this_step(worker, parameters, log):
    """Where only this rank failed, the others are still in the failed bucket: this one would wait for them for ever."""
    worker.buckets[0].pipeline.error = RuntimeError("the network is down")
    handles = [put(worker, p) for p in parameters]
    for handle in reversed(handles):
        with pytest.raises(RuntimeError, match="the network is down"):
            handle()
    worker.finish()
    assert [number for number, *_ in log] == [0]


def test_handing_in_does_not_wait_for_the_exchange(worker, parameters, log):
    worker.buckets[0].pipeline.gate = threading.Event()
    handles = [put(worker, p) for p in parameters]
    assert log == []
    worker.buckets[0].pipeline.gate.set()
    handles[3]()
    assert len(log) == 2


def test_progress_names_the_bucket_in_exchange_and_its_stage_or_the_next_one(worker, parameters):
    assert worker.progress() == Progress(0, 0, "")
    first = worker.buckets[0].pipeline
    first.gate = threading.Event()
    handles = [put(worker, p) for p in parameters[:2]]
    while not worker.progress().stage:
        pass
    assert worker.progress() == Progress(0, 0, "exchange")
    first.gate.set()
    handles[0]()
    worker._thread.submit(lambda: None).result()  # after what the worker does behind the result
    assert worker.progress() == Progress(0, 1, "")
    put(worker, parameters[2])
    put(worker, parameters[3])()
    worker._thread.submit(lambda: None).result()
    assert worker.progress() == Progress(1, 0, "")
    worker.finish()
    assert worker.progress() == Progress(1, 0, "")


def test_traffic_is_the_sum_of_the_buckets(worker):
    assert (worker.traffic.bytes_sent, worker.traffic.messages_sent) == (20, 2)
