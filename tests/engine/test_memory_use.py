"""Memory use is one residual of the model's size, or the configured share of it."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "memory.py"


@pytest.mark.parametrize(
    ("spec", "buckets", "least", "most"),
    [
        # One bucket: its residual and a tenth more, and entries as candidates, vector, message and total.
        pytest.param("topka:density=0.001", 1, 3.9, 4.46, marks=pytest.mark.full),
        ("topka:density=0.01", 1, 3.9, 5.0),
        # Twenty share what they need in passing: a twentieth of a residual for the one at work, and its entries.
        pytest.param("randomblock:memory=none,density=0.05", 20, -0.05, 0.55, marks=pytest.mark.full),
        pytest.param("conef:saving=0.6,density=0.05", 20, 1.55, 2.15, marks=pytest.mark.nightly),
        pytest.param("conef:saving=0.9,density=0.05", 20, 0.35, 0.95, marks=pytest.mark.full),
        pytest.param("conef:compressor=quantize,bits=8,density=0.05", 20, 0.95, 1.55, marks=pytest.mark.nightly),
    ],
)
def test_bytes_per_element(spec, buckets, least, most):
    result = launch.python(str(PROGRAM), spec, str(buckets))
    assert result.returncode == 0, result.stderr
    assert least < float(result.stdout) < most
