"""A rank that raises or leaves ends the job: nobody waits for it until the time limit of the cluster."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "train.py"
LEAVE = PROGRAM.with_name("leave.py")
FULL = pytest.mark.full


def run(stage):
    return launch.python(str(PROGRAM), stage, ranks=3)


# While nothing is under way, while buckets are, and in the thread that exchanges them.
@pytest.mark.parametrize(
    "stage", [pytest.param("forward", marks=FULL), pytest.param("backward", marks=FULL), "exchange"]
)
def test_an_uncaught_exception_ends_all_ranks_and_is_shown(stage):
    result = run(stage)
    assert result.returncode != 0
    assert "KeyError: 'the data set is gone'" in result.stderr
    assert "rank 1: ends all ranks because of the KeyError above" in result.stderr
    assert "trained" not in result.stdout


@pytest.mark.parametrize(
    "stage", [pytest.param("exit in forward", marks=FULL), pytest.param("exit in backward", marks=FULL), "fewer steps"]
)
def test_a_rank_that_leaves_early_ends_the_job_with_a_reason(stage):
    # Which of the two it is depends on whether a rank waits for a bucket already when Horovod is shut down.
    reasons = ("rank 1 of 3 has left the program or shut MPI down", "Horovod has been shut down")
    result = run(stage)
    assert result.returncode in (1, 3), result.stderr  # of the abort, or rank 1's own; a crash has another
    assert any(reason in result.stderr for reason in reasons)
    assert result.stdout.count("trained") <= 1


LEFT = "rank 1 of 3 has left the program or shut MPI down"


@pytest.mark.full
def test_a_rank_that_leaves_in_a_round_of_local_steps_ends_the_job_with_a_reason():
    result = launch.python(str(PROGRAM.with_name("local_steps.py")), ranks=3)
    assert result.returncode == 1, result.stderr
    reasons = (f"{LEFT}, but synchronize() waits", f"nothing can be exchanged: {LEFT}", "Horovod has been shut down")
    assert any(reason in result.stderr for reason in reasons)
    assert result.stdout.count("trained") <= 1


# With mpi4py it is this that starts and ends MPI, else Horovod; tests of test_calls.py do without both.
@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (["shutdown", "step"], [f"{LEFT}, but bucket 0 waits for it"]),
        (["shutdown", "step", "mpi4py"], [f"{LEFT}, but bucket 0 waits for it"]),
        (["shutdown", "preempted"], [f"{LEFT}, but preempted() waits for it"]),
        (["shutdown", "construction"], [LEFT, "Horovod has been shut down"]),
        (["finalize", "step"], [f"{LEFT}, but bucket 0 waits for it"]),
        (["finalize", "step", "mpi4py"], [f"{LEFT}, but bucket 0 waits for it"]),
        (["thread", "step"], ["rank 1: ends all ranks because of the KeyError above, in thread reader"]),
    ],
    ids=lambda one: " ".join(one)[:30],
)
def test_a_rank_that_shuts_down_or_loses_a_thread_ends_the_job_with_its_name(arguments, reasons):
    result = launch.python(str(LEAVE), *arguments, ranks=3, limit=90)
    assert result.returncode != 0
    assert any(reason in result.stderr for reason in reasons), result.stderr
    assert "trained" not in result.stdout
