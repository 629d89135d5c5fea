"""One residual of the model's size, or as little of it as was asked for, and nothing else of that size."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest

PROGRAM = Path(__file__).parent / "programs" / "memory.py"


def bytes_per_element(spec, buckets=1):
    result = launch.python(str(PROGRAM), spec, str(buckets))
    assert result.returncode == 0, result.stderr
    return float(result.stdout)


@pytest.mark.parametrize("density", [0.001, 0.01])
def test_a_bucket_needs_its_residual_and_a_tenth_more_at_most(density):
    measured = bytes_per_element(f"topka:density={density}")
    assert 3.9 < measured < 4.4 + 60 * density  # entries exist as candidates, vector, message and total


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("randomblock:memory=none", 0.0),
        ("conef:saving=0.6", 1.6),
        ("conef:saving=0.9", 0.4),
        ("conef:compressor=quantize,bits=8", 1.0),
    ],
)
def test_buckets_share_what_they_need_in_passing(spec, expected):
    """Twenty buckets: a twentieth of a residual for the one at work, and its entries."""
    measured = bytes_per_element(spec + ("," if ":" in spec else ":") + "density=0.05", buckets=20)
    assert expected - 0.05 < measured < expected + 0.55
