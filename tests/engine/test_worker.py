"""The worker starts buckets in order, for any order of the gradients."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from buckets import recording_buckets

from horovod_sparse.control.report import Progress
from horovod_sparse.engine import layout
from horovod_sparse.engine.device import Device
from horovod_sparse.engine.reading import Reading
from horovod_sparse.engine.step import State
from horovod_sparse.engine.worker import Worker
from horovod_sparse.rules import Conditions

KEYS = ("0", "1", "2", "3")


@pytest.fixture
def log():
    return []


@pytest.fixture
def worker(monkeypatch, log):
    """Two buckets of two gradients."""
    buckets, _ = recording_buckets(monkeypatch, log, [torch.zeros(10) for _ in KEYS])
    made = Worker(lambda _: Reading(Conditions(0.1)), undoable=True)
    made.needs_confirmation = True
    made.add(buckets)
    return made


def put(worker, *keys):
    """Submit ones; return the result tensors."""
    gradients = [torch.ones(10) for _ in keys]
    for key, gradient in zip(keys, gradients, strict=True):
        worker.put(key, gradient)
    return gradients


def settled(worker):
    """Drain the worker."""
    worker._thread.submit(lambda: None).result()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_buckets_run_in_their_order(worker, log, order):
    results = put(worker, *[KEYS[i] for i in order])
    worker.wait_for_results()
    assert all(torch.equal(result, torch.full((10,), 0.5)) for result in results)
    assert log == [(0, [0, 10], 0.1), (1, [0, 10], 0.1)]


def test_a_bucket_waits_for_the_one_before_it(worker, log):
    put(worker, *KEYS[2:])
    worker.finish()
    assert log == []


def test_an_unused_parameter_is_not_waited_for(worker, log):
    worker.leave_out(KEYS[0])
    put(worker, *KEYS[1:])
    worker.wait_for_results()
    assert log == [(0, [10], 0.1), (1, [0, 10], 0.1)]


def test_the_norm_that_is_clipped_leaves_out_held_gradients(monkeypatch, log):
    norms, (buckets, _) = [], recording_buckets(monkeypatch, log, [torch.zeros(10) for _ in KEYS])
    worker = Worker(lambda _: Reading(Conditions(0.1)), undoable=True, factor_for=lambda norm: norms.append(norm) or 1)
    worker.needs_confirmation = True
    worker.add(buckets)
    worker.put(KEYS[0], torch.full((10,), 7.0), hold=True)
    put(worker, *KEYS[1:])
    worker.wait_for_results()
    assert norms == pytest.approx([30**0.5])


def test_an_error_is_raised_to_the_waiting_thread_and_the_next_step_starts_clean(worker, log):
    worker.buckets[0].pipeline.error = RuntimeError("the network is down")
    put(worker, *KEYS)
    with pytest.raises(RuntimeError, match="down") as caught:
        worker.wait_for_results()
    frames = [str(entry.path) for entry in caught.traceback]
    assert frames[0] == __file__  # the user's line first, and none of the thread pool's
    assert not [path for path in frames if "concurrent" in path or "threading" in path]
    worker.finish()
    worker.buckets[0].pipeline.error = None
    results = put(worker, *KEYS)
    worker.wait_for_results()
    assert all(torch.equal(result, torch.full((10,), 0.5)) for result in results)


def test_an_unconfirmed_step_is_undone_before_the_next(worker, log):
    for confirmed in (True, False, True):
        put(worker, *KEYS)
        worker.finish()
        if confirmed:
            worker.confirm()
    worker.undo_if_undoable()
    steps, undone = [[0, 10], [0, 10]], ["undone", "undone"]
    assert [event for _, event, *_ in log] == steps + steps + undone + steps


def test_a_step_is_collected_exchanged_reduced_and_applied_or_skipped(worker):
    found = [worker.step.state]
    for end in (worker.confirm, worker.undo_if_undoable):
        for act in (lambda: put(worker, *KEYS[:3]), lambda: put(worker, KEYS[3]), worker.finish, end):
            act()
            found.append(worker.step.state)
    until_reduced = [State.COLLECTING, State.EXCHANGING, State.REDUCED]
    assert found == [State.APPLIED, *until_reduced, State.APPLIED, *until_reduced, State.SKIPPED]
    with pytest.raises(AssertionError, match="from SKIPPED to APPLIED"):
        worker.step.enter(State.APPLIED)


def test_buckets_that_are_added_to_an_exchanged_step_take_part_in_it(worker, monkeypatch, log):
    put(worker, *KEYS)
    parameters = [torch.zeros(10) for _ in range(len(KEYS) + 1)]
    buckets, _ = recording_buckets(monkeypatch, log, parameters, bucket_bytes=40)
    worker.add(buckets[-1:])
    with pytest.raises(AssertionError, match="before its bucket was complete"):
        worker.wait_for_results()
    put(worker, *buckets[-1].layout.keys)
    worker.wait_for_results()
    assert [number for number, *_ in log] == [0, 1, buckets[-1].layout.number]


def test_only_exchanged_buckets_are_undone_and_only_once(worker, log):
    """Buckets after a failed one are not exchanged: if only this rank failed, the others still wait in that one."""
    worker.buckets[0].pipeline.error = RuntimeError("the network is down")
    put(worker, *KEYS)
    worker.finish()
    worker.undo_if_undoable()
    worker.undo_if_undoable()
    assert log == [(0, [0, 10], 0.1), (0, "undone")]


def test_submitting_does_not_wait_for_the_exchange(worker, log):
    worker.buckets[0].pipeline.gate = threading.Event()
    put(worker, *KEYS)
    assert log == []
    worker.buckets[0].pipeline.gate.set()
    worker.wait_for_results()
    assert len(log) == 2


def test_progress_names_the_bucket_in_exchange_and_its_stage_or_the_next_one(worker):
    assert worker.progress() == Progress(0, 0, "")
    first = worker.buckets[0].pipeline
    first.gate = threading.Event()
    put(worker, *KEYS[:2])
    while not worker.progress().stage:
        pass
    assert worker.progress() == Progress(0, 0, "exchange")
    first.gate.set()
    settled(worker)
    assert worker.progress() == Progress(0, 1, "")
    put(worker, *KEYS[2:])
    settled(worker)
    assert worker.progress() == Progress(1, 0, "")
    worker.finish()
    assert worker.progress() == Progress(1, 0, "")


class Following(Device):
    """A device that notes whether the gradients still exist when the caller's stream follows its own."""

    def __init__(self):
        self.gradients, self.alive = [], []

    def follow(self):
        self.alive.append([gradient() is not None for gradient in self.gradients])


@pytest.fixture
def device(monkeypatch):
    made = Following()
    monkeypatch.setattr(layout, "device_of", lambda _: made)
    return made


def put_unreferenced(worker, device, *keys):
    """Submit gradients without other references."""
    device.gradients = [weakref.ref(gradient) for gradient in put(worker, *keys)]


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_are_kept_until_the_callers_stream_follows_the_work_on_them(device, worker, fails):
    """torch may reuse the memory of gradients without references."""
    worker.buckets[0].pipeline.error = RuntimeError("the network is down") if fails else None
    put_unreferenced(worker, device, *KEYS)
    settled(worker)
    assert device.alive == []
    worker.finish()
    assert device.alive == [[True] * 4]
    worker.buckets[0].pipeline.error = None  # whose traceback has them, too
    settled(worker)
    gc.collect()
    assert not any(gradient() is not None for gradient in device.gradients)


def test_gradients_of_an_unfinished_step_are_kept_as_well(device, monkeypatch, log):
    buckets, _ = recording_buckets(monkeypatch, log, [torch.zeros(10) for _ in KEYS])
    worker = Worker(lambda _: Reading(Conditions(0.1)))
    worker.add(buckets)
    put_unreferenced(worker, device, *KEYS[:3])
    settled(worker)
    del worker, buckets
    gc.collect()
    assert device.alive == [[True] * 3]
    assert not any(gradient() is not None for gradient in device.gradients)
