"""The watch asks ranks that do not answer once, believes what they say later, and ends with its worker."""

from __future__ import annotations

import time
import weakref

import pytest
from laws import everywhere

from horovod_sparse.watchdog import watch
from horovod_sparse.watchdog.report import Limits, Progress
from horovod_sparse.watchdog.watch import Watch

pytestmark = pytest.mark.mpi


NAMES = [["weight"]]


class Waiting:
    """Stands in for a worker that has come so far and no further; weakly referenced, as a worker is."""

    def __init__(self, stage):
        self.stage = stage

    def progress(self):
        return Progress(0, 0, self.stage)


def watch_over(comm, worker, report):
    return Watch(comm, weakref.WeakMethod(worker.progress), NAMES, Limits(report, 0))


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(watch, "_PERIOD", 0.05)
    monkeypatch.setattr(watch, "_PATIENCE", 0.5)


def until(condition, limit=30):
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_a_rank_that_does_not_answer_is_asked_once_and_believed_later(hvd, comm, caplog):
    comm, last = comm.Dup(), comm.Get_size() - 1
    worker = None
    if comm.Get_rank() < last:
        worker = Waiting("agree")
        watching = watch_over(comm, worker, 0.6)
        silent = f"rank {last}: missing, gives no answer"
        assert until(lambda: sum(silent in one.getMessage() for one in caplog.records) >= 3), caplog.text
        assert all("stage agree of bucket 0 (weight) in step 0" in one.getMessage() for one in caplog.records)
    comm.Barrier()
    if comm.Get_rank() == last:
        assert len(waiting_messages(comm)) == last
        worker = Waiting("")
        watching = watch_over(comm, worker, 0.6)
        for rank in range(last):
            watching._send((0, 0, ""), rank, watch._ANSWERS)  # to what was received above
    else:
        away = f"rank {last}: missing, its program has not come to bucket 0 of step 0"
        assert until(lambda: away in caplog.text), caplog.text
    comm.Barrier()
    del worker
    assert everywhere(comm, until(lambda: not watching._thread.is_alive()))


def waiting_messages(comm):
    asked = []
    while comm.Iprobe(tag=watch._ASKS):
        asked.append(comm.recv(tag=watch._ASKS))
    return asked


def test_a_wait_that_goes_on_is_not_reported(hvd, comm, caplog):
    steps, ended = iter(range(10**6)), []
    progress = lambda: Progress(next(steps), 0, "exchange")  # noqa: E731
    watching = Watch(comm.Dup(), lambda: None if ended else progress, NAMES, Limits(0.3, 0))
    time.sleep(1)
    assert everywhere(comm, not caplog.records and watching._thread.is_alive())
    ended.append(True)
    assert everywhere(comm, until(lambda: not watching._thread.is_alive()))
