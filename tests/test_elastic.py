"""Elastic training under torchrun goes on after ranks and agents are killed or added, and loses no gradient."""

from __future__ import annotations

import re
from pathlib import Path

import launch
import pytest

PROGRAM = str(Path(__file__).parent / "elastic.py")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_gradient_is_in_the_parameters_or_in_a_residual():
    result = launch.python(PROGRAM, "--kills", "2", "--seed", "1", "--limit", "240", limit=590)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search("^2 disturbances: ", result.stdout, re.MULTILINE)
    assert "sum of all updates" in result.stdout
