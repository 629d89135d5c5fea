"""A rank that raises or leaves ends the job: nobody waits for it until the time limit of the cluster."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest

PROGRAM = Path(__file__).parent / "programs" / "train.py"


def run(stage, dense_below=0):
    return launch.python(str(PROGRAM), stage, str(dense_below), ranks=3)


def test_nothing_happens_to_a_run_without_errors():
    result = run("nowhere")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("trained") == 3


# While nothing is under way, while buckets are, and in the thread that exchanges them.
@pytest.mark.parametrize("stage", ["forward", "backward", "exchange"])
def test_an_uncaught_exception_ends_all_ranks_and_is_shown(stage):
    result = run(stage)
    assert result.returncode != 0
    assert "KeyError: 'the data set is gone'" in result.stderr
    assert "rank 1: ends all ranks because of the KeyError above" in result.stderr
    assert "trained" not in result.stdout


@pytest.mark.parametrize(
    ("stage", "dense_below"),
    [("exit in forward", 1024), ("exit in backward", 0), ("exit in backward", 1024), ("fewer steps", 0)],
)
def test_a_rank_that_leaves_early_ends_the_job_with_a_reason(stage, dense_below):
    # Which of the two it is depends on whether a rank waits for a bucket already when Horovod is shut down.
    reasons = ("rank 1 of 3 has left the program, but bucket", "Horovod has been shut down")
    result = run(stage, dense_below)
    assert result.returncode in (1, 3), result.stderr  # of the abort, or rank 1's own; a crash has another
    assert any(reason in result.stderr for reason in reasons)
    assert result.stdout.count("trained") <= 1
