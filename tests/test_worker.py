"""The worker starts buckets in their order, whatever order gradients come in."""

from __future__ import annotations

import threading

import pytest
import torch

from horovod_sparse.bucket import Member, plan
from horovod_sparse.collectives import Traffic
from horovod_sparse.stall import Progress
from horovod_sparse.step import Step
from horovod_sparse.worker import Worker


class Recorder:
    """Stands in for a pipeline: notes that it ran, and fails or waits when told to."""

    def __init__(self, log, number):
        self.log, self.number = log, number
        self.traffic = Traffic(10, 1)
        self.stage = "exchange"
        self.error = None
        self.gate = None

    def run(self, gradients, outputs, step, factor):
        if self.gate:
            assert self.gate.wait(10)
        self.log.append((self.number, [start for start, _ in gradients], step.learning_rate, step.idle))
        if self.error:
            raise self.error
        for _, output in outputs:
            output *= factor

    def confirm(self):
        self.log.append((self.number, "confirmed"))

    def undo(self):
        self.log.append((self.number, "undone"))


@pytest.fixture
def parameters():
    return [torch.zeros(10) for _ in range(4)]


@pytest.fixture
def log():
    return []


@pytest.fixture
def worker(parameters, log):
    buckets = plan([Member(str(i), p, group=0) for i, p in enumerate(parameters)], bucket_bytes=80)
    pipelines = [Recorder(log, bucket.number) for bucket in buckets]
    return Worker(buckets, pipelines, factor=0.5, conditions=lambda _: lambda: Step(0.1))


def put(worker, p, **settings):
    return worker.put(p, torch.ones(10), **settings)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_buckets_run_in_their_order(worker, parameters, log, order):
    handles = [put(worker, parameters[i]) for i in order]
    assert all(torch.equal(handle(), torch.full((10,), 0.5)) for handle in handles)
    assert log == [(0, [0, 10], 0.1, False), (1, [0, 10], 0.1, False)]


def test_a_bucket_waits_for_the_one_before_it(worker, parameters, log):
    put(worker, parameters[2])
    put(worker, parameters[3])
    worker.finish()
    assert log == []


def test_held_parameters_are_written_but_not_read(worker, parameters, log):
    handles = [put(worker, p, hold=i == 1) for i, p in enumerate(parameters)]
    assert handles[1]().tolist() == [0.5] * 10
    assert log[0] == (0, [0], 0.1, False)


def test_a_parameter_left_out_is_not_waited_for(worker, parameters, log):
    worker.leave_out(parameters[0])
    put(worker, parameters[1])()
    assert log == [(0, [10], 0.1, False)]


def test_an_error_reaches_who_waits_and_the_next_step_starts_clean(worker, parameters, log):
    worker.pipelines[0].error = RuntimeError("the network is down")
    handles = [put(worker, p) for p in parameters]
    with pytest.raises(RuntimeError, match="down"):
        handles[0]()
    worker.finish()
    worker.pipelines[0].error = None
    handles = [put(worker, p) for p in parameters]
    assert all(torch.equal(handle(), torch.full((10,), 0.5)) for handle in handles)


def test_a_step_that_is_not_confirmed_is_undone_before_the_next(worker, parameters, log):
    for confirmed in (True, False, True):
        for handle in [put(worker, p) for p in parameters]:
            handle()
        worker.finish()
        if confirmed:
            worker.confirm()
    events = [event for number, event, *_ in log if number == 0]
    assert events == [[0, 10], "confirmed", [0, 10], "undone", [0, 10], "confirmed"]
    worker.settle()
    assert (0, "undone") not in log[-2:]


def test_buckets_behind_one_that_failed_are_not_exchanged_in_this_step(worker, parameters, log):
    """Where only this rank failed, the others are still in the failed bucket: this one would wait for them for ever."""
    worker.pipelines[0].error = RuntimeError("the network is down")
    handles = [put(worker, p) for p in parameters]
    for handle in reversed(handles):
        with pytest.raises(RuntimeError, match="the network is down"):
            handle()
    worker.finish()
    assert [number for number, *_ in log] == [0]


def test_handing_in_does_not_wait_for_the_exchange(worker, parameters, log):
    worker.pipelines[0].gate = threading.Event()
    handles = [put(worker, p) for p in parameters]
    assert log == []
    worker.pipelines[0].gate.set()
    handles[3]()
    assert len(log) == 2


def test_progress_names_the_bucket_in_exchange_and_its_stage_or_the_next_one(worker, parameters):
    assert worker.progress() == Progress(0, 0, "")
    first = worker.pipelines[0]
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


def test_a_gradient_in_another_layout_comes_back_in_the_parameters(parameters):
    p = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (bucket,) = plan([Member("p", p, group=0)], 10**6)
    worker = Worker([bucket], [Recorder([], 0)], 2.0, conditions=lambda _: lambda: Step(0.1))
    gradient = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    result = worker.put(p, gradient)()
    assert torch.equal(result, 2 * gradient)
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_traffic_is_the_sum_of_the_buckets(worker):
    assert (worker.traffic.bytes_sent, worker.traffic.messages_sent) == (20, 2)
