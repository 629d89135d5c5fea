"""The benchmark of a sharded model's memory runs, and shows what a rank needs."""

from __future__ import annotations

import launch
import pytest


@pytest.mark.nightly
def test_a_residual_needs_more_than_fsdp_alone():
    short = ("--ranks", "2", "--millions", "8", "--steps", "2", "--contenders", "FSDP2", "residual")
    result = launch.python("-m", "benchmarks.sharded_memory", *short)
    assert result.returncode == 0, result.stderr
    rows = dict(line.rsplit(maxsplit=1) for line in result.stdout.splitlines()[-2:])
    assert 2 < float(rows["FSDP2"]) < float(rows["residual"])
