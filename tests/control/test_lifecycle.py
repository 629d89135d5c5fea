"""A process that fails or leaves ends the job instead of blocking it; replaced functions are restored."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace

import launch
import pytest
from mpi4py import MPI

from horovod_sparse.control.lifecycle import Lifecycle
from horovod_sparse.transport.mpi import MPITransport

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
FULL, NIGHTLY = pytest.mark.full, pytest.mark.nightly
LEFT = "rank 1 of 3 has left the program or ended communication"

FINALIZE = """
import threading, time
from mpi4py import MPI
from horovod_sparse.control.lifecycle import process
from horovod_sparse.transport.mpi import job

process.join(job())
entered = threading.Event()

def exchange():
    with process.communicating():
        entered.set()
        time.sleep(0.5)
        print("finalized inside" if MPI.Is_finalized() else "inside", flush=True)

worker = threading.Thread(target=exchange)
worker.start()
entered.wait()
MPI.Finalize()
print("finalized", flush=True)
try:
    with process.communicating():
        print("inside again")
except RuntimeError as error:
    print(error)
"""

CLOSE = """
import os, sys, threading
from horovod_sparse.control.lifecycle import process
from horovod_sparse.transport.mpi import job

hooks = sys.excepthook, threading.excepthook
process.abort_on_error()
process.abort_on_error()
process.join(job())  # from now on, a forked copy is not this rank
assert sys.excepthook is not hooks[0] and threading.excepthook is not hooks[1]
thread = process.background("horovod_sparse")
done = []
thread.submit(lambda: done.append(threading.Event().wait(0.3)))
if os.fork() == 0:
    process.close()  # a copy has no threads to wait for, and is no rank
    os._exit(0 if sys.excepthook is not hooks[0] else 1)
assert os.wait()[1] == 0
process.close()
assert done == [False] and not thread.busy
assert (sys.excepthook, threading.excepthook) == hooks
process.close()
process.abort_on_error()  # and again, as after hvd.shutdown() and hvd.init()
assert sys.excepthook is not hooks[0]
with process.communicating():
    print("closed twice")
"""


def test_mpi_is_finalized_only_when_no_thread_is_inside():
    result = launch.python("-c", FINALIZE)
    lines = result.stdout.splitlines()
    assert lines[:2] == ["inside", "finalized"], result.stderr
    assert lines[2].startswith("cannot communicate: Horovod has been shut down")


def test_close_completes_what_is_in_progress_and_can_be_called_again():
    result = launch.python("-c", CLOSE)
    assert (result.returncode, result.stdout) == (0, "closed twice\n"), result.stderr


def test_a_replaced_function_is_restored_unless_other_code_has_replaced_it_since():
    lifecycle, (library, other) = Lifecycle(), (SimpleNamespace(double=lambda x: 2 * x) for _ in range(2))
    original = library.double
    for _ in range(2):
        lifecycle.replace(library, "double", lambda function: lambda x: function(x) + 1)
        lifecycle.replace(other, "double", lambda function: lambda x: function(x) + 1)
    assert (library.double(3), other.double(3)) == (7, 7)
    theirs = other.double = lambda x: x
    lifecycle.close()
    assert library.double is original
    assert other.double is theirs


def test_reports_name_the_outermost_call_and_learn_its_ranks_from_inner_ones():
    lifecycle = Lifecycle()
    with lifecycle.communicating("DistributedOptimizer()"):
        (call,) = lifecycle.calls
        assert (call.name, call.transport) == ("DistributedOptimizer()", None)
        transport = MPITransport(MPI.COMM_SELF)
        with lifecycle.communicating("creation of a communicator", transport):
            assert lifecycle.calls == [call]
        assert call.transport is transport
    assert lifecycle.calls == []


# While nothing is under way, while buckets are, and in the thread that exchanges them.
@pytest.mark.parametrize(
    "stage", [pytest.param("forward", marks=NIGHTLY), pytest.param("backward", marks=FULL), "exchange"]
)
def test_an_uncaught_exception_ends_all_ranks_and_is_shown(stage, training_server):
    result = launch.python(str(PROGRAMS / "train.py"), stage, ranks=3, server=training_server)
    assert result.returncode != 0
    assert "KeyError: 'the data set is gone'" in result.stderr
    assert "rank 1: ends all ranks because of the KeyError above" in result.stderr
    assert "trained" not in result.stdout


@pytest.mark.parametrize(
    "stage",
    [pytest.param("exit in forward", marks=NIGHTLY), pytest.param("exit in backward", marks=FULL), "fewer steps"],
)
def test_a_rank_that_leaves_early_ends_the_job_with_a_reason(stage, training_server):
    # Which of the two it is depends on whether a rank waits for a bucket already when Horovod is shut down.
    reasons = (LEFT, "Horovod has been shut down")
    result = launch.python(str(PROGRAMS / "train.py"), stage, ranks=3, server=training_server)
    assert result.returncode in (1, 3), result.stderr  # of the abort, or rank 1's own; a crash has another
    assert any(reason in result.stderr for reason in reasons)
    assert result.stdout.count("trained") <= 1


@pytest.mark.parametrize(
    ("torchrun", "delay"),
    [
        pytest.param(None, "0", marks=FULL, id="mpirun-0"),
        pytest.param((), "1", marks=FULL, id="torchrun-1"),
        pytest.param(None, "1", marks=NIGHTLY, id="mpirun-1"),
        pytest.param((), "0", marks=NIGHTLY, id="torchrun-0"),
    ],
)
def test_a_rank_that_leaves_in_a_round_of_local_steps_ends_the_job_with_a_reason(torchrun, delay):
    result = launch.python(str(PROGRAMS / "local_steps.py"), delay, ranks=3, torchrun=torchrun)
    assert result.returncode == 1, result.stderr
    reasons = [f"{LEFT}, but synchronize() waits", f"cannot communicate: {LEFT}", "Horovod has been shut down"]
    if torchrun is not None:
        reasons = ["rank 1 of 3 has closed its connection", LEFT]
    assert any(reason in result.stderr for reason in reasons)
    assert result.stdout.count("trained") <= 1


# The bucket waits already, or begins after the rank has been missed.
IN_STEP = [f"{LEFT}, but bucket 0 of step 3 waits for it", f"cannot communicate: {LEFT}"]
# Horovod may end MPI on this rank before the farewell of the other arrives.
SHUT_DOWN = [*IN_STEP, "cannot communicate: Horovod has been shut down, here or by a rank that has left the program"]


# With mpi4py it is this that starts and ends MPI, else Horovod; tests of the watch do without both.
@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        pytest.param(arguments.split(), reasons, marks=mark, id=arguments)
        for arguments, reasons, mark in (
            ("shutdown step", SHUT_DOWN, FULL),
            ("shutdown step mpi4py", SHUT_DOWN, NIGHTLY),
            ("shutdown preempted", [f"{LEFT}, but preempted() waits for it"], NIGHTLY),
            ("shutdown construction", [LEFT, "Horovod has been shut down"], NIGHTLY),
            ("finalize step", IN_STEP, NIGHTLY),
            ("finalize step mpi4py", IN_STEP, FULL),
            ("thread step", ["rank 1: ends all ranks because of the KeyError above, in thread reader"], FULL),
        )
    ],
)
def test_a_rank_that_shuts_down_or_loses_a_thread_ends_the_job_with_its_name(arguments, reasons):
    result = launch.python(str(PROGRAMS / "leave.py"), *arguments, ranks=3, limit=90)
    assert result.returncode != 0
    assert any(reason in result.stderr for reason in reasons), result.stderr
    assert "trained" not in result.stdout


@pytest.fixture
def leave(training_server):
    """Runs `in_flight.py`; returns its result, and the seconds between rank 1's leaving and the end of the job."""

    def run(*arguments):
        program = str(PROGRAMS / "in_flight.py")
        result = launch.python(program, *arguments, ranks=3, limit=60, server=training_server)
        (left,) = re.findall(r"leaves at (\S+)", result.stdout)
        return result, time.time() - float(left)

    return run


@pytest.mark.parametrize(
    ("where", "what"),
    [
        pytest.param("save", "Checkpoints.save() or load()", marks=NIGHTLY),
        pytest.param("preempted", "preempted()", marks=FULL),
        pytest.param("construction", "DistributedOptimizer()", marks=NIGHTLY),
        ("bucket", "bucket 0 of step 1 of optimizer 2"),
        pytest.param("horovod", "an operation of Horovod", marks=FULL),
    ],
)
def test_a_rank_that_exits_with_a_bucket_in_flight_is_not_waited_for_elsewhere(leave, where, what):
    result, seconds = leave("bucket", where)
    assert result.returncode != 0
    assert f"{LEFT}, but {what} waits for it" in result.stderr
    assert "completed" not in result.stdout
    assert seconds < 8, "5 seconds, and what mpirun takes to end"


@FULL
@pytest.mark.parametrize("what", [["bucket", "nowhere"], ["checkpoint"]])
def test_a_rank_that_exits_completes_what_the_others_wait_for(leave, what):
    result, seconds = leave(*what)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("completed") == 2
    assert seconds > 4, "the others came later than a rank that has left is waited for"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("SystemExit", r"leaves the program; SystemExit interrupted step\(\) while bucket 0 was in exchange"),
        pytest.param("TimeoutError", "ends all ranks because of the TimeoutError above", marks=FULL),
        pytest.param("KeyboardInterrupt", "ends all ranks because of the KeyboardInterrupt above", marks=NIGHTLY),
        pytest.param(
            "caught",
            r"TimeoutError interrupted step\(\) while .*: start again from the last",
            marks=FULL,
        ),
    ],
)
def test_an_exception_raised_while_step_waits_is_not_delayed(leave, how, reason):
    result, seconds = leave(how)
    assert result.returncode != 0
    assert re.search(f"rank 1: {reason}", result.stderr), result.stderr
    assert "completed" not in result.stdout
    assert seconds < 8, "the others compute for 20 seconds"
