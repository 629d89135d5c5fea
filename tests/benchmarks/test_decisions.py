"""Decisions of the preset over the rate of the links: tables, the figure, and a short run on an emulated cluster."""

from __future__ import annotations

import json

import pytest

from benchmarks.cluster import decisions, decisions_report, emulated
from benchmarks.cluster.__main__ import build_parser, main
from benchmarks.runner import Records

PNG = b"\x89PNG\r\n"


def record(rate, contender, milliseconds, turn=0, **more):
    same = {"kind": "steps", "model": "cnn", "turn": turn, "ranks": 4, "steps": 60, "density": 1.0, "decided": None}
    return {**same, "rate": rate, "contender": contender, "milliseconds": milliseconds, "exposed": None, **more}


def final(rate, contender, value, turn=0, metric="accuracy"):
    same = {"kind": "accuracy", "model": "cnn", "turn": turn, "ranks": 4, "steps": 60, "metric": metric}
    return {**same, "rate": rate, "contender": contender, "final": value}


RECORDS = [
    record("10mbit", "recommended", 37.0, density=0.002, decided=61, exposed=8.0),
    record("none", "alone", 30.0),
    record("none", "alone", 29.0, turn=1),
    record("none", "recommended", 33.0, density=0.1, decided=85, exposed=1.0),
    record("none", "recommended", 35.0, turn=1, density=1.0, decided=97, exposed=2.5),
    record("memory", "alone", 20.0),
    record("1gbit", "alone", 30.0),
    record("1gbit", "recommended", 36.0, density=0.03, decided=61, exposed=4.0),
]
CHANGE = {
    "kind": "change",
    "model": "cnn",
    "turn": 0,
    "ranks": 4,
    "steps": 400,
    "rate": "1gbit,50mbit",
    "contender": "recommended",
    "rates": [
        {"rate": "1gbit", "decided": [85], "density": 0.03, "milliseconds": 36.0},
        {"rate": "50mbit", "decided": [], "density": 0.002, "milliseconds": 41.26},
    ],
}


def test_the_tables_show_medians_and_spread_and_what_was_chosen_when_on_links_in_their_order():
    assert decisions_report.tables(RECORDS).splitlines() == [
        "## cnn: ms a step",
        "",
        "| ms a step | shared memory | no limit | 1 Gbit/s | 10 Mbit/s |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| `recommended` |  | 34.0 (33.0 to 35.0) | 36.0 | 37.0 |",
        "| alone | 20.0 | 29.5 (29.0 to 30.0) | 30.0 |  |",
        "| density that it chose, by turn |  | 0.1, 1 | 0.03 | 0.002 |",
        "| in step |  | 85, 97 | 61 | 61 |",
        "| exposed, by its own count |  | 1.0, 2.5 | 4.0 | 8.0 |",
        "",
        "## cnn: ms a step more than `alone`",
        "",
        "| ms exposed | no limit | 1 Gbit/s | 10 Mbit/s |",
        "| --- | ---: | ---: | ---: |",
        "| `recommended` | 4.5 (3.0 to 6.0) | 6.0 |  |",
    ]


def test_the_tables_show_accuracies_and_links_that_change():
    records = [
        *(final("1gbit", "horovod", 0.8 + turn / 100, turn) for turn in range(3)),
        final("1gbit", "recommended", 0.81),
        final("10mbit", "recommended", None),
    ]
    assert decisions_report.tables([*records, CHANGE]).splitlines() == [
        "## cnn: after the last step",
        "",
        "| accuracy | 1 Gbit/s | 10 Mbit/s |",
        "| --- | ---: | ---: |",
        "| horovod | 81.00% (80.00% to 82.00%) |  |",
        "| `recommended` | 81.00% | diverged |",
        "",
        "## cnn: links that change",
        "",
        "| turn | link | decided after, steps | density | ms a step |",
        "| --- | --- | ---: | ---: | ---: |",
        "| 0 | 1 Gbit/s | 85 | 0.03 | 36.0 |",
        "| 0 | 50 Mbit/s | - | 0.002 | 41.3 |",
    ]


def missing(*words, done=()):
    records = Records()
    records.lines.extend(done)
    return records.missing(decisions.keys(build_parser().parse_args(["decisions", *words])))


def test_missing_records_are_measured_and_contenders_alternate():
    words = ["--models", "cnn,wide", "--rates", "none,1gbit", "--contenders", "alone", "recommended", "--turns", "2"]
    keys = missing(*words)
    assert len(keys) == 2 * 2 * 2 * 2
    assert [(key["rate"], key["model"], key["turn"], key["contender"]) for key in keys[:3]] == [
        ("none", "cnn", 0, "alone"),
        ("none", "cnn", 0, "recommended"),
        ("none", "cnn", 1, "alone"),
    ]
    done = [{**key, "milliseconds": 1.0} for key in keys[::2]]
    assert missing(*words, done=done) == keys[1::2]
    assert missing(*words, "--steps", "5", done=done) == [{**key, "steps": 5} for key in keys]
    assert missing(*words, "--nodes", "2", done=done) == [{**key, "ranks": 2} for key in keys]
    # Data is there for the first model only, and computing alone learns nothing.
    more = missing(*words, "--accuracy", "50", done=[*done, *keys])
    assert {(key["kind"], key["model"], key["contender"], key["steps"]) for key in more} == {
        ("accuracy", "cnn", "recommended", 50)
    }
    changes = missing(*words, "--change", "1gbit,50mbit", done=done)
    assert [(key["model"], key["rate"], key["turn"]) for key in changes] == [
        (model, "1gbit,50mbit", turn) for turn in range(2) for model in ("cnn", "wide")
    ]


@pytest.mark.full
def test_the_figure_is_drawn(tmp_path):
    decisions_report.plot([*RECORDS, CHANGE], tmp_path / "decisions.png")
    assert (tmp_path / "decisions.png").read_bytes().startswith(PNG)


@pytest.mark.nightly
def test_a_short_run_decides_on_a_link_and_again_where_it_changes(tmp_path, capsys):
    if reason := emulated.obstacle():
        pytest.skip(f"no emulated cluster here: {reason}")
    path = tmp_path / "decisions.jsonl"
    words = ["decisions", "--nodes", "2", "--models", "cnn", "--output", str(path), "--turns", "1"]
    once = [*words, "--rates", "memory,1gbit", "--contenders", "alone", "recommended", "--steps", "3"]
    assert main(once) == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["rate"], one["contender"]) for one in records] == [
        (rate, name) for rate in ("memory", "1gbit") for name in ("alone", "recommended")
    ]
    assert all(one["milliseconds"] > 0 for one in records)
    assert all(0 < one["decided"] <= 102 for one in records if one["contender"] == "recommended")
    assert all(0 <= one["exposed"] <= one["milliseconds"] for one in records if one["contender"] == "recommended")
    assert main(once) == 0  # everything has a record
    assert len(path.read_text().splitlines()) == 4
    assert (tmp_path / "decisions.png").read_bytes().startswith(PNG)
    capsys.readouterr()
    assert main([*words, "--change", "1gbit,50mbit", "--change-steps", "110"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("| 0 | 1 Gbit/s | ")
    assert first.split(" | ")[2].isdigit()
    assert second.startswith("| 0 | 50 Mbit/s | ")
    assert (tmp_path / "decisions.md").read_text().splitlines()[-1] == second
