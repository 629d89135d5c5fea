"""Which algorithm counts as rightly predicted, and the figures derived from measured and predicted times."""

from __future__ import annotations

import json

import pytest
from matplotlib.axes import Axes

from benchmarks.cluster.comparison import Cell, Row, as_json, plot, table, verdict
from horovod_sparse.costs.model import Compute
from horovod_sparse.costs.network import Link


def cell(times: dict[str, tuple[float, float]], rate: str = "1gbit") -> Cell:
    """Algorithms with their measured and predicted times."""
    rows = [
        Row(name, measured, best=measured, exchange=measured, predicted=predicted, wire_bytes=1e6)
        for name, (measured, predicted) in times.items()
    ]
    return Cell(rate, 8, 0.01, 1000, Link(1e-5, 8e-9), Compute(0, 0, 0, 0), rows)


RIGHT = cell({"dense": (1600, 1500), "topka": (130, 120), "oktopk": (40, 30)})
NEAR = cell({"dense": (119, 90), "oktopk": (100, 95)})
MISSED = cell({"dense": (121, 90), "oktopk": (100, 95)}, "100mbit")


def test_a_choice_within_a_fifth_is_good_and_beyond_it_is_not():
    assert NEAR.choice.algorithm == MISSED.choice.algorithm == "dense"
    found = verdict([RIGHT, NEAR, MISSED])
    assert (found["cells"], found["good"], found["first"]) == (3, 2, 1)
    assert found["missed"] == ["100mbit, 8 ranks, density 0.01: dense takes 1.21 times as long as oktopk"]


def test_the_ratio_is_that_to_the_dense_ring():
    assert [RIGHT.speedup(row) for row in RIGHT.rows] == [1, 1600 / 130, 40]
    assert cell({"topka": (10, 10)}).speedup(RIGHT.rows[1]) is None


def test_the_error_of_the_predictions_is_reported():
    errors = verdict([RIGHT, NEAR])["measured to predicted, median"]
    assert errors["oktopk"] == pytest.approx((40 / 30 + 100 / 95) / 2)


def test_predictions_within_a_factor_of_one_and_a_half_are_close():
    off = cell({"dense": (151, 100), "topka": (149, 100), "oktopk": (100, 149), "gtopk": (100, 151)})
    assert verdict([off])["share of predictions within a factor of 1.5"] == 0.5


def test_the_table_holds_every_time_and_marks_the_choice():
    lines = table([RIGHT]).splitlines()
    assert "8 ranks" in lines[1]
    assert "1000 Mbit/s" in lines[1]
    assert [line.split()[1] for line in lines[3:]] == ["oktopk", "topka", "dense"]
    assert ["predicted to be first" in line for line in lines[3:]] == [True, False, False]
    assert "40.00x" in lines[3]


def test_the_file_holds_every_cell():
    [read] = json.loads(json.dumps(as_json([RIGHT])))
    assert read["speedups"]["oktopk"] == 40
    assert (read["fastest"], read["choice"]) == ("oktopk", "oktopk")
    assert read["rows"][2]["measured"] == 40


def test_the_figure_says_which_side_of_the_line_is_slower(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Axes, "text", lambda axes, x, y, text, **style: drawn.append((x < 0.5, y > 0.5, text)))
    plot([RIGHT, NEAR, MISSED], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    aid = [
        (True, True, "above the line: slower than predicted"),
        (False, False, "below the line: faster than predicted"),
    ]
    assert drawn == 2 * aid  # in the panel of each rate
