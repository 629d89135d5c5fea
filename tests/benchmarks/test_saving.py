"""The benchmark of saving runs, and leaves nothing behind."""

from __future__ import annotations

import launch
import pytest


@pytest.mark.nightly
def test_all_ways_are_measured(tmp_path):
    short = ("--millions", "1", "--device-ms", "1", "--steps", "4", "--every", "2", "--turns", "1")
    result = launch.python("-m", "benchmarks.saving", "--folder", str(tmp_path), *short, ranks=2)
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[-3:]] == ["none", "async_save", "save"]
    assert list(tmp_path.iterdir()) == []
