"""Benchmarks that start other programs run with small settings, and leave nothing behind."""

from __future__ import annotations

import re

import launch
import pytest

pytestmark = pytest.mark.nightly


@pytest.mark.timeout(300)
def test_restarts_have_a_row_for_each_model(tmp_path):
    short = ("--millions", "1", "--kills", "1", "--within", "0", "--seconds", "0", "--device-ms", "10", "--every", "5")
    result = launch.python("-m", "benchmarks.restarts", "--folder", str(tmp_path), *short, limit=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^1 M, [0-9]+, .*%$", result.stdout, re.MULTILINE), result.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_way_of_saving_is_measured(tmp_path):
    short = ("--millions", "1", "--device-ms", "1", "--steps", "4", "--every", "2", "--turns", "1")
    result = launch.python("-m", "benchmarks.saving", "--folder", str(tmp_path), *short, ranks=2)
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[-3:]] == ["none", "async_save", "save"]
    assert list(tmp_path.iterdir()) == []


def test_a_residual_needs_more_memory_than_fsdp_alone():
    short = ("--ranks", "2", "--millions", "8", "--steps", "2", "--contenders", "FSDP2", "residual")
    result = launch.python("-m", "benchmarks.sharded_memory", *short)
    assert result.returncode == 0, result.stderr
    rows = dict(line.rsplit(maxsplit=1) for line in result.stdout.splitlines()[-2:])
    assert 2 < float(rows["FSDP2"]) < float(rows["residual"])
