"""The watch reports where ranks wait and which have left, and queries a silent rank only once."""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from types import SimpleNamespace

import launch
import pytest
from laws import everywhere
from mpi4py import MPI

from horovod_sparse.control import link, watch
from horovod_sparse.control.report import Limits, Progress
from horovod_sparse.control.watch import Watch
from horovod_sparse.transport.mpi import MPITransport

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
from horovod_sparse.transport.mpi import MPITransport, job

process.join(job())
process.abort_on_error()
world = MPITransport(MPI.COMM_WORLD.Dup())
rank = world.rank
waited_for = MPITransport(world.comm.Split(rank == 1)) if way == "some ranks" else world
process.watch.start(None if way == "unknown" else world)
world.barrier()

def fail():
    raise KeyError("the data set is gone")

if rank == 1:
    if way.startswith("finalize"):
        MPI.Finalize()
    elif way == "daemon":
        threading.Thread(target=fail, daemon=True).start()
        time.sleep(3)
    elif way in ("stalls", "unknown"):
        time.sleep(1000)
if rank == 2 and way == "some ranks":
    time.sleep(3)
if rank != 1 or way == "daemon":
    with process.communicating("the call", waited_for):
        waited_for.barrier()
"""
LEFT = (
    "rank 1 of 3 has left the program or ended communication, but the call waits for it: "
    "let every rank take the same number of steps"
)
LIMITS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}


def run(way, **variables):
    result = launch.python("-c", PROGRAM, way, ranks=3, limit=50, **variables)
    return result.returncode, result.stderr


@pytest.mark.parametrize("way", ["finalize", "finalize elsewhere", "exit"])
def test_a_rank_that_ends_mpi_or_its_program_ends_the_job_with_its_name(way):
    status, errors = run(way)
    assert status != 0
    assert LEFT in errors


@pytest.mark.full
@pytest.mark.parametrize(("way", "said"), [("daemon", "KeyError: 'the data set is gone'"), ("some ranks", "")])
def test_errors_of_daemon_threads_and_ranks_outside_the_call_do_not_end_the_job(way, said):
    """In other threads, an uncaught exception does: see ``test_lifecycle.py``."""
    status, errors = run(way)
    assert status == 0, errors
    assert said in errors


@pytest.mark.parametrize(
    ("way", "who"),
    [
        ("stalls", "rank 1: missing, has not reached this call"),
        pytest.param("unknown", "some", marks=pytest.mark.full),
    ],
)
def test_a_call_that_stalls_is_reported_before_it_ends_the_job(way, who):
    status, errors = run(way, **LIMITS)
    assert status != 0
    warned = rf"^rank [02]: has waited [12] s in the call: .*{who}.*; ends all ranks after 3 s"
    assert re.search(warned, errors, re.MULTILINE), errors
    ended = rf"^rank [02]: has waited [345] s in the call: .*{who}.*stall_abort=3 s"
    assert re.search(ended, errors, re.MULTILINE), errors


class Program:
    """Fake process whose program waits in no call."""

    job = SimpleNamespace(rank=MPI.COMM_WORLD.Get_rank(), size=3)
    calls = ()
    background_calls = ()
    communicating = staticmethod(contextlib.nullcontext)

    def abort(self, reason):
        raise AssertionError(reason)


class Worker:
    """Fake worker with given progress; weakly referenced, as a worker is."""

    def __init__(self, *steps):
        self.steps, self.stage = iter(steps), "agree"

    def progress(self):
        return Progress(next(self.steps, 0), 0, self.stage)

    def leaves_at(self):
        return 0, 0

    def names(self, bucket):
        return ["weight"]


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(watch, "_PERIOD", 0.05)
    monkeypatch.setattr(watch, "_PATIENCE", 0.3)


@pytest.fixture
def asked(monkeypatch):
    """Ranks that were queried."""
    ranks, post = [], MPITransport.post

    def recording_post(self, content, rank, kind):
        ranks.extend([rank] * (kind == link._ASKS))
        post(self, content, rank, kind)

    monkeypatch.setattr(MPITransport, "post", recording_post)
    return ranks


def until(condition, limit=30):
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.mpi
def test_a_silent_rank_is_queried_once_and_its_late_answer_is_used(hvd, transport, caplog, hasty, asked):
    transport, last, watching, worker = transport.duplicate(), transport.size - 1, Watch(Program()), Worker()
    stopped = watching._lock if transport.rank == last else contextlib.nullcontext()
    if transport.rank == last:
        worker.stage = ""
    silent = f"rank {last}: missing, gives no answer"
    away = f"rank {last}: missing, has not reached bucket 0 of step 0"
    watching.add(transport, weakref.ref(worker), Limits(0.4, 0))
    with stopped:
        if transport.rank == 0 < last:
            assert until(lambda: sum(silent in one.getMessage() for one in caplog.records) >= 3), caplog.text
            assert all("stage agree of bucket 0 (weight) in step 0" in one.getMessage() for one in caplog.records)
            assert asked.count(last) == 1
        transport.barrier()
    if transport.rank == 0 < last:
        assert until(lambda: away in caplog.text), caplog.text
    transport.barrier()
    watching.close()
    assert everywhere(transport, watching._thread is None)


@pytest.mark.mpi
@pytest.mark.parametrize("missing", [None, 0])
def test_only_the_first_waiting_rank_after_a_missing_one_reports(hvd, transport, caplog, hasty, asked, missing):
    transport, watching, worker = transport.duplicate(), Watch(Program()), Worker()
    rank, ranks, reporter = transport.rank, transport.size, 0 if missing is None else 1
    worker.stage = "" if rank == missing else "exchange"
    watching.add(transport, weakref.ref(worker), Limits(0.4, 0))
    if rank == reporter:
        assert until(lambda: len(caplog.records) > 1), caplog.text
    transport.barrier()
    with watching._lock:
        mine = len(caplog.records) > 0, set(asked)
    reports, queried = zip(*transport.allgather_object(mine), strict=True)
    assert reports == tuple(rank == reporter for rank in range(ranks))
    for other in range(ranks):
        others = {*range(ranks)} - {other}
        assert queried[other] <= (others if other == reporter else set() if other == missing else {other - 1})
        assert queried[other] == others or other != reporter
    transport.barrier()
    watching.close()


@pytest.mark.mpi
def test_a_rank_ends_the_job_if_the_reporting_rank_does_not(hvd, transport, hasty):
    """The earlier one may have begun to wait much later; here, it never reports."""
    transport, watching, worker, reasons = transport.duplicate(), Watch(Program()), Worker(), []
    watching._process.abort = reasons.append
    watching.add(transport, weakref.ref(worker), Limits(0, 0.4 * (transport.rank > 0)))
    if transport.rank:
        assert until(lambda: reasons), "no rank ended the job"
        said = r"has waited [\d.]+ s in stage agree of bucket 0 .*: rank {}: waits there too; .*stall_abort=0.4 s"
        assert re.match(said.format(transport.rank - 1), reasons[0]), reasons
    transport.barrier()
    watching.close()
    assert everywhere(transport, transport.rank > 0 or not reasons)


@pytest.mark.mpi
def test_a_farewell_reaches_the_group_of_a_deleted_exchange_but_not_one_of_all_ranks(hvd, transport, hasty):
    """The farewells to all ranks together reach few neighbors, which may be none of a group's."""
    world, group = transport.duplicate(), MPITransport(transport.comm.Split(transport.rank == 0))
    watching, workers = Watch(Program()), [Worker(), Worker()]
    for one, worker in zip((group, transport.duplicate()), workers, strict=True):
        watching.add(one, weakref.ref(worker), Limits(0, 0))
    watching.start(world)
    del worker
    workers.clear()
    expected = [group.members] if group.size < transport.size else []
    assert everywhere(
        transport,
        until(lambda: [one.link.ranks for one in watching._exchanges.values()] == expected, limit=5),
    )
    watching.close()


@pytest.mark.mpi
def test_progress_is_not_reported_as_a_stall(hvd, transport, caplog, hasty):
    watching, worker = Watch(Program()), Worker(*range(10**4))
    worker.stage = "exchange"
    watching.add(transport.duplicate(), weakref.ref(worker), Limits(0.3, 0))
    time.sleep(1)
    assert everywhere(transport, not caplog.records and watching._thread.is_alive())
    del worker
    watching.close()


@pytest.mark.mpi
def test_all_ranks_know_an_exchange_by_the_same_number(hvd, transport, hasty):
    """Some may have made more of them, with other ranks, or have fewer left."""
    watching, workers = Watch(Program()), [Worker() for _ in range(transport.rank + 2)]
    for worker in workers[1:]:
        watching.add(MPITransport(MPI.COMM_SELF.Dup()), weakref.ref(worker), Limits(0, 0))
    watching.add(transport.duplicate(), weakref.ref(workers[0]), Limits(0, 0))
    assert everywhere(transport, max(watching._exchanges) == transport.size + 1)
    watching.close()
