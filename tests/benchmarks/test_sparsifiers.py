"""benchmarks.kernels.sparsifiers: every rule runs and is verified, also as one of several ranks."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks.kernels import sparsifiers
from horovod_sparse.sparsifiers import SPARSIFIERS

pytestmark = pytest.mark.full


def test_every_rule_is_timed_and_verified(monkeypatch, capsys):
    asked = ["--sizes", "200k", "--densities", "0.01", "--ranks", "3,8", "--turns", "1"]
    monkeypatch.setattr(sys, "argv", ["sparsifiers", *asked])
    assert sparsifiers.main() == 0
    table = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    rows = {name: numbers for name, *numbers in table if len(numbers) == 5}
    assert {name for name in SPARSIFIERS if name != "stable"} <= rows.keys()
    for ranks in (3, 8):
        for name in sparsifiers.DIVIDED:
            fast, median, _, entries, wrong = rows[f"{name}, P={ranks}"]
            assert 0 < float(fast) <= float(median)
            assert wrong == "0"
            assert float(entries) == pytest.approx(1 / ranks, rel=0.2)


def test_a_wrong_number_of_entries_is_noticed(monkeypatch):
    case = sparsifiers.Case(50_000, 0.01, threads=1, ranks=[4])
    assert case.wrong("micro, P=4")[0] == 0
    monkeypatch.setattr(case, "_ranks", {"micro, P=4": 1})
    assert case.wrong("micro, P=4")[0] == 1
