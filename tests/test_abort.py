"""A rank that raises ends the job: nobody waits for it until the time limit of the cluster."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest

PROGRAM = Path(__file__).parent / "programs" / "train.py"


def run(stage):
    return launch.python(str(PROGRAM), stage, ranks=3)


def test_nothing_happens_to_a_run_without_errors():
    result = run("nowhere")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("trained") == 3


@pytest.mark.parametrize("stage", ["forward", "backward", "synchronize"])
def test_an_uncaught_exception_ends_all_ranks_and_is_shown(stage):
    result = run(stage)
    assert result.returncode != 0
    assert "KeyError: 'the data set is gone'" in result.stderr
    assert "rank 1: ends all ranks because of the KeyError above" in result.stderr
    assert "trained" not in result.stdout
