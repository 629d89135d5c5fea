"""Before there is an exchange, the watch of the process knows who waits in which call, and who has left."""

from __future__ import annotations

import re

import launch
import pytest

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
from horovod_sparse.mpi.lifetime import inside_mpi
from horovod_sparse.watchdog import calls, watch
from horovod_sparse.watchdog.abort import abort_on_error

watch._PERIOD, watch._PATIENCE, watch._FAREWELL = 0.1, 0.5, 1
abort_on_error()
world = MPI.COMM_WORLD.Dup()
calls.watch_calls(None if way == "unknown" else world)
if way == "some ranks":
    calls.some_ranks_call()
world.Barrier()

def fail():
    raise KeyError("the data set is gone")

if world.Get_rank() == 1:
    if way.startswith("finalize"):
        MPI.Finalize()
    elif way in ("thread", "daemon"):
        threading.Thread(target=fail, name="reader", daemon=way == "daemon").start()
        time.sleep(3)
    elif way in ("stalls", "unknown"):
        time.sleep(1000)
    elif way == "some ranks":
        time.sleep(3)  # has left, and comes back for this call alone
if world.Get_rank() != 1 or way in ("daemon", "some ranks"):
    if way == "some ranks" and world.Get_rank() == 1:
        for rank in (0, 2):
            world.send(None, rank, watch._LEAVES)
        time.sleep(2)
    with inside_mpi("the call"):
        world.Barrier()
"""
LEFT = "rank 1 of 3 has left the program or shut MPI down, but the call waits for it: let every rank take as many steps"
LIMITS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}


def run(way: str, **variables: str) -> tuple[int, str]:
    result = launch.python("-c", PROGRAM, way, ranks=3, limit=50, **variables)
    return result.returncode, result.stderr


@pytest.mark.parametrize("way", ["finalize", "finalize elsewhere", "exit"])
def test_a_rank_that_ends_mpi_or_its_program_ends_the_job_with_its_name(way: str) -> None:
    status, errors = run(way)
    assert status != 0
    assert LEFT in errors


def test_an_uncaught_exception_in_a_thread_ends_the_job_unless_the_thread_is_a_helper() -> None:
    status, errors = run("thread")
    assert status != 0
    assert "rank 1: ends all ranks because of the KeyError above, in thread reader" in errors
    status, errors = run("daemon")
    assert status == 0
    assert "KeyError: 'the data set is gone'" in errors


def test_a_rank_that_has_left_is_not_missed_where_some_ranks_make_calls() -> None:
    status, errors = run("some ranks")
    assert status == 0, errors


@pytest.mark.parametrize(("way", "who"), [("stalls", "rank 1: missing, its program has not come"), ("unknown", "some")])
def test_a_call_that_stalls_is_reported_before_it_ends_the_job(way: str, who: str) -> None:
    status, errors = run(way, **LIMITS)
    assert status != 0
    warned = (
        rf"^rank [02]: has waited [12] s in the call before bucket 0 of step 0: .*{who}.*; all ranks are ended when "
    )
    assert re.search(warned, errors, re.MULTILINE), errors
    ended = rf"^rank [02]: has waited [345] s in the call before bucket 0 of step 0: .*{who}.*stall_abort=3 s"
    assert re.search(ended, errors, re.MULTILINE), errors
