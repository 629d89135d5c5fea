"""One residual of the model's size, and nothing else of that size."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest

PROGRAM = Path(__file__).parent / "programs" / "memory.py"


@pytest.mark.parametrize("density", [0.001, 0.01])
def test_a_bucket_needs_its_residual_and_a_tenth_more_at_most(density):
    result = launch.python(str(PROGRAM), str(density))
    assert result.returncode == 0, result.stderr
    assert 3.9 < float(result.stdout) < 4.4 + 60 * density  # entries exist as candidates, vector, message and total
