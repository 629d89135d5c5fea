"""Runs with statistics, as the report reads them."""

from __future__ import annotations

import pytest

from horovod_sparse import metrics
from horovod_sparse.cli.runs import Run, read_runs

RECORDS = [
    {"step": 10, "loss": 2.0, "total/steps": 10, "total/bytes_sent": 100, "seconds_forward": 0.5},
    {"step": 20, "loss": None, "total/steps": 10, "total/bytes_sent": 200, "total/seconds_select": 0.2},
    {"step": 25, "loss": 1.0, "total/steps": 5, "total/bytes_sent": 400, "accuracy": 0.5, "seconds_forward": 0.5},
]


def test_curves_skip_missing_numbers():
    run = Run("a", {}, RECORDS)
    assert run.curve("loss") == ([10, 25], [2.0, 1.0])
    assert run.over_bytes("loss") == ([100, 700], [2.0, 1.0])
    assert run.over_bytes("accuracy") == ([700], [0.5])
    assert run.curve("unknown") == run.over_bytes("unknown") == ([], [])
    assert (run.last("loss"), run.last("unknown"), run.middle("unknown")) == (1.0, None, None)
    assert run.total("total/bytes_sent") == 700


def test_sums_are_reported_per_step():
    run = Run("a", {}, RECORDS)
    assert run.per_step("total/bytes_sent") == 20  # of 10, 20 and 80
    ms = run.ms()
    assert (ms["forward"], ms["select"], ms["backward"]) == (pytest.approx(75.0), pytest.approx(20.0), None)


def test_runs_are_named_by_folder_or_by_path_if_folders_have_the_same_name(tmp_path):
    for folder in ("a/x", "b/x", "c"):
        metrics.Log(tmp_path / folder, compression="topka").write(1, {})
    x, other, c = tmp_path / "a" / "x", tmp_path / "b" / "x", tmp_path / "c"
    assert [run.name for run in read_runs([x, c])] == ["x", "c"]
    assert [run.name for run in read_runs([x, other])] == [str(x), str(other)]
    assert read_runs([c])[0].label == "c (topka)"
    assert Run("c", {}, []).label == "c"
