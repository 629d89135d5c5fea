"""The soak test in short: a training that is killed and preempted now and then ends as an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest


@pytest.mark.full
@pytest.mark.timeout(400)
def test_three_disturbances_leave_no_trace():
    program = str(Path(__file__).parent / "soak.py")
    short = ["--epochs", "2", "--ranks", "2", "--every", "5", "--strikes", "3", "--checkpoint-every", "4"]
    result = launch.python(program, *short, "--seed", "1", limit=390)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "final parameters                  equal" in result.stdout
