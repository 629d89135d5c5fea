"""The watch of a process knows who waits where and who has left, and asks a rank that does not answer only once."""

from __future__ import annotations

import contextlib
import re
import time
import weakref

import launch
import pytest
from laws import everywhere
from mpi4py import MPI

from horovod_sparse.control import link, watch
from horovod_sparse.control.report import Limits, Progress
from horovod_sparse.control.watch import Watch

PROGRAM = """
import sys, threading, time
way = sys.argv[1]
if way == "finalize elsewhere":  # MPI is initialized on another thread, as by Horovod
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    starter = threading.Thread(target=lambda: MPI.Init_thread(MPI.THREAD_MULTIPLE))
    starter.start()
    starter.join()
else:
    from mpi4py import MPI
from horovod_sparse.control import watch
from horovod_sparse.control.lifecycle import process

watch._PERIOD, watch._PATIENCE, watch._GRACE = 0.1, 0.5, 1
process.abort_on_error()
world = MPI.COMM_WORLD.Dup()
rank = world.Get_rank()
waited_for = world.Split(rank == 1) if way == "some ranks" else world
process.watch.start(None if way == "unknown" else world)
world.Barrier()

def fail():
    raise KeyError("the data set is gone")

if rank == 1:
    if way.startswith("finalize"):
        MPI.Finalize()
    elif way in ("thread", "daemon"):
        threading.Thread(target=fail, name="reader", daemon=way == "daemon").start()
        time.sleep(3)
    elif way in ("stalls", "unknown"):
        time.sleep(1000)
if rank == 2 and way == "some ranks":
    time.sleep(3)
if rank != 1 or way == "daemon":
    with process.inside_mpi("the call", waited_for):
        waited_for.Barrier()
"""
LEFT = "rank 1 of 3 has left the program or shut MPI down, but the call waits for it: let every rank take as many steps"
LIMITS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
NAMES = [["weight"]]


def run(way, **variables):
    result = launch.python("-c", PROGRAM, way, ranks=3, limit=50, **variables)
    return result.returncode, result.stderr


@pytest.mark.parametrize("way", ["finalize", "finalize elsewhere", "exit"])
def test_a_rank_that_ends_mpi_or_its_program_ends_the_job_with_its_name(way):
    status, errors = run(way)
    assert status != 0
    assert LEFT in errors


def test_an_uncaught_exception_in_a_thread_ends_the_job_unless_the_thread_is_a_helper():
    status, errors = run("thread")
    assert status != 0
    assert "rank 1: ends all ranks because of the KeyError above, in thread reader" in errors
    status, errors = run("daemon")
    assert status == 0
    assert "KeyError: 'the data set is gone'" in errors


@pytest.mark.full
def test_a_rank_that_has_left_is_not_missed_in_a_call_that_concerns_others():
    status, errors = run("some ranks")
    assert status == 0, errors


@pytest.mark.parametrize(
    ("way", "who"), [("stalls", "rank 1: missing, has not reached this call"), ("unknown", "some")]
)
def test_a_call_that_stalls_is_reported_before_it_ends_the_job(way, who):
    status, errors = run(way, **LIMITS)
    assert status != 0
    warned = rf"^rank [02]: has waited [12] s in the call: .*{who}.*; ends all ranks after 3 s"
    assert re.search(warned, errors, re.MULTILINE), errors
    ended = rf"^rank [02]: has waited [345] s in the call: .*{who}.*stall_abort=3 s"
    assert re.search(ended, errors, re.MULTILINE), errors


class Program:
    """Stands in for a process whose program waits in no call."""

    rank = 0
    calls = ()
    background_calls = ()
    inside_mpi = staticmethod(contextlib.nullcontext)

    def abort(self, reason):
        raise AssertionError(reason)


class Worker:
    """Stands in for a worker that has come so far and no further; weakly referenced, as a worker is."""

    def __init__(self, *steps):
        self.steps, self.stage = iter(steps), "agree"

    def progress(self):
        return Progress(next(self.steps, 0), 0, self.stage)

    def started(self):
        return 0, 0


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(watch, "_PERIOD", 0.05)
    monkeypatch.setattr(watch, "_PATIENCE", 0.3)


@pytest.fixture
def asked(monkeypatch):
    """Ranks that were asked, of the communicator."""
    ranks, send = [], link.Link._send

    def recording_send(self, content, rank, tag):
        ranks.extend([rank] * (tag == link._ASKS))
        send(self, content, rank, tag)

    monkeypatch.setattr(link.Link, "_send", recording_send)
    return ranks


def until(condition, limit=30):
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.mpi
def test_a_rank_that_does_not_answer_is_asked_once_and_believed_later(hvd, comm, caplog, hasty, asked):
    comm, last, watching, worker = comm.Dup(), comm.Get_size() - 1, Watch(Program()), Worker()
    stopped = watching._lock if comm.Get_rank() == last else contextlib.nullcontext()
    if comm.Get_rank() == last:
        worker.stage = ""
    silent = f"rank {last}: missing, gives no answer"
    away = f"rank {last}: missing, has not reached bucket 0 of step 0"
    watching.add(comm, weakref.ref(worker), NAMES, Limits(0.4, 0))
    with stopped:
        if comm.Get_rank() < last:
            assert until(lambda: sum(silent in one.getMessage() for one in caplog.records) >= 3), caplog.text
            assert all("stage agree of bucket 0 (weight) in step 0" in one.getMessage() for one in caplog.records)
            assert asked.count(last) == 1
        comm.Barrier()
    if comm.Get_rank() < last:
        assert until(lambda: away in caplog.text), caplog.text
    comm.Barrier()
    watching.close()
    assert everywhere(comm, watching._thread is None)


@pytest.mark.mpi
def test_a_wait_that_goes_on_is_not_reported(hvd, comm, caplog, hasty):
    watching, worker = Watch(Program()), Worker(*range(10**4))
    worker.stage = "exchange"
    watching.add(comm.Dup(), weakref.ref(worker), NAMES, Limits(0.3, 0))
    time.sleep(1)
    assert everywhere(comm, not caplog.records and watching._thread.is_alive())
    del worker
    watching.close()


@pytest.mark.mpi
def test_all_ranks_know_an_exchange_by_the_same_number(hvd, comm, hasty):
    """Some may have made more of them, with other ranks, or have fewer left."""
    watching, workers = Watch(Program()), [Worker() for _ in range(comm.Get_rank() + 2)]
    for worker in workers[1:]:
        watching.add(MPI.COMM_SELF.Dup(), weakref.ref(worker), NAMES, Limits(0, 0))
    watching.add(comm.Dup(), weakref.ref(workers[0]), NAMES, Limits(0, 0))
    assert everywhere(comm, max(watching._exchanges) == comm.Get_size() + 1)
    watching.close()
