"""The benchmark of restarts kills a rank, measures, and leaves nothing behind."""

from __future__ import annotations

import re

import launch
import pytest


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_row_for_a_small_model(tmp_path):
    short = ("--millions", "1", "--kills", "1", "--within", "0", "--seconds", "0", "--device-ms", "10", "--every", "5")
    result = launch.python("-m", "benchmarks.restarts", "--folder", str(tmp_path), *short, limit=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^1 M, [0-9]+, .*%$", result.stdout, re.MULTILINE), result.stdout
    assert list(tmp_path.iterdir()) == []
