"""Decisions of the preset over the rate of the links: tables, the figure, and a short run on an emulated cluster."""

from __future__ import annotations

import json

import pytest

from benchmarks.cluster import decisions, emulated
from benchmarks.cluster.__main__ import main

PNG = b"\x89PNG\r\n"


def record(rate, contender, milliseconds, turn=0, **more):
    same = {"model": "cnn", "turn": turn, "density": 1.0, "decided": None}
    return {**same, "rate": rate, "contender": contender, "milliseconds": milliseconds, **more}


RECORDS = [
    record("none", "alone", 30.0),
    record("none", "recommended", 33.0, density=0.1, decided=85),
    record("none", "recommended", 35.0, turn=1, density=1.0, decided=97),
    record("1gbit", "alone", 30.0),
    record("1gbit", "recommended", 36.0, density=0.03, decided=61),
    record("10mbit", "recommended", 37.0, density=0.002, decided=61),
]


def test_the_table_shows_medians_and_what_was_chosen_when():
    assert decisions.table(RECORDS, "cnn").splitlines() == [
        "| ms a step | none | 1gbit | 10mbit |",
        "| --- | ---: | ---: | ---: |",
        "| alone | 30.0 | 30.0 |  |",
        "| `recommended` | 34.0 | 36.0 | 37.0 |",
        "| density that it chose, by turn | 0.1, 1 | 0.03 | 0.002 |",
        "| in step | 85, 97 | 61 | 61 |",
    ]


@pytest.mark.full
def test_the_figure_is_drawn(tmp_path):
    decisions.plot(RECORDS, tmp_path / "decisions.png")
    assert (tmp_path / "decisions.png").read_bytes().startswith(PNG)


@pytest.mark.full
def test_a_short_run_decides_on_a_link_and_again_where_it_changes(tmp_path, capsys):
    if reason := emulated.obstacle():
        pytest.skip(f"no emulated cluster here: {reason}")
    words = ["decisions", "--ranks", "2", "--models", "cnn", "--output", str(tmp_path)]
    once = [*words, "--rates", "memory,1gbit", "--contenders", "alone,recommended", "--turns", "1", "--steps", "3"]
    assert main(once) == 0
    records = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert [(one["rate"], one["contender"]) for one in records] == [
        (rate, name) for rate in ("memory", "1gbit") for name in ("alone", "recommended")
    ]
    assert all(one["milliseconds"] > 0 for one in records)
    assert all(0 < one["decided"] <= 102 for one in records if one["contender"] == "recommended")
    assert main(once) == 0  # everything has a record
    assert len((tmp_path / "decisions.jsonl").read_text().splitlines()) == 4
    capsys.readouterr()
    assert main([*words, "--change", "1gbit,50mbit", "--change-steps", "110"]) == 0
    first, second = capsys.readouterr().out.splitlines()[2:]
    assert first.startswith("| 1gbit | ")
    assert first.split(" | ")[1].isdigit()
    assert second.startswith("| 50mbit | ")
