"""Checkpoints of one program, loaded by another with fewer ranks."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "checkpoint.py"


def owed(output: str) -> list[float]:
    (line,) = [line for line in output.splitlines() if line.startswith("owed")]
    return [float(number) for number in line.split()[1:]]


@pytest.mark.slow
def test_what_a_killed_run_saved_is_taken_over_by_fewer_ranks(tmp_path):
    """kill -9 of a rank that has written its part: the checkpoint before it counts."""
    folder = tmp_path / "checkpoints"
    killed = launch.python(str(PROGRAM), str(folder), "save", ranks=4)
    assert killed.returncode != 0
    assert "step-00000005" not in {path.name for path in folder.iterdir()}
    resumed = launch.python(str(PROGRAM), str(folder), "load", ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    for rank in range(2):
        said = f"rank {rank} goes on from 4: 4 ranks saved it and 2 go on, with the data and buffers of rank 0"
        assert said in resumed.stdout
    before, after = owed(killed.stdout), owed(resumed.stdout)
    assert len(before) > 1
    assert after == pytest.approx(before, rel=1e-6)
    assert all(before)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006"]
