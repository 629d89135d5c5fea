"""Time to an accuracy: which trainings wait, and what table and figure make of their records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import horovod_sparse as hvs
from benchmarks.cluster import accuracy, emulated
from benchmarks.cluster.__main__ import build_parser, main
from benchmarks.cluster.accuracy import EXCHANGES
from benchmarks.cluster.accuracy_report import outcomes, plot, table
from benchmarks.runner import Records

ROOT = Path(__file__).resolve().parents[2]
LABELS = {"dense": "dense", "ours": "topka"}


def record(run: str, values: list[float], seed: int = 0):
    curve = [
        {"step": 10 * number, "value": value, "seconds": 10.0 * number, "bytes_sent": 1e6 * number}
        for number, value in enumerate(values, start=1)
    ]
    return {"run": run, "rate": "1gbit", "seed": seed, "curve": curve}


def test_targets_that_some_seeds_miss_are_not_averaged():
    records = [record("dense", [0.9]), record("topka", [0.9]), record("topka", [0.8], seed=1)]
    row = table(outcomes(records, LABELS, 0.9)).splitlines()[-1]
    assert "not reached by 1" in row
    assert " x " not in row


@pytest.mark.parametrize("first", [0.6, 0.9])
def test_the_figure_is_a_png_also_where_no_seed_or_only_one_reaches_the_target(tmp_path, first):
    records = [record("dense", [0.5, 0.9]), record("topka", [0.6, first]), record("topka", [0.5], seed=1)]
    plot(outcomes(records, LABELS, 0.9), tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_every_exchange_can_be_made_and_is_called_by_one_name():
    assert len({one.name for one in EXCHANGES.values()}) == len(EXCHANGES)
    for one in EXCHANGES.values():
        if not one.spec.startswith("powersgd"):
            hvs.parse(one.spec)


def missing(options):
    return Records(options.output / "records.jsonl").missing(accuracy.keys(options))


def test_missing_records_are_trained_and_exchanges_alternate(tmp_path):
    words = ["accuracy", "--output", str(tmp_path), "--steps", "8", "--seeds", "2", "--contenders", "dense", "topka"]
    options = build_parser().parse_args([*words, "--rates", "1gbit,100mbit"])
    every = missing(options)
    assert [(key["rate"], key["seed"], key["run"]) for key in every] == [
        (rate, seed, name) for rate in ("1gbit", "100mbit") for seed in (0, 1) for name in ("dense", "topka")
    ]
    (tmp_path / "records.jsonl").write_text(json.dumps(every[3]) + "\n")
    assert missing(options) == every[:3] + every[4:]


def test_the_published_page_shows_all_records_of_the_default_command(tmp_path):
    docs = ROOT / "docs"
    options = build_parser().parse_args(["accuracy", "--output", str(tmp_path)])
    (tmp_path / "records.jsonl").write_bytes((docs / "data" / "accuracy" / "records.jsonl").read_bytes())
    assert not missing(options)
    options.page = tmp_path / "page.md"
    options.page.write_bytes((docs / "appendix/performance.md").read_bytes())
    accuracy.report(options)
    assert options.page.read_text() == (docs / "appendix/performance.md").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_missing_trainings_run_and_are_reported(tmp_path, monkeypatch, capfd):
    if reason := emulated.obstacle():
        pytest.skip(f"no emulated cluster here: {reason}")
    monkeypatch.chdir(ROOT)
    small = ["accuracy", "--task", "digits", "--steps", "8", "--seeds", "1", "--nodes", "2", "--target", "0.05"]
    words = [*small, "--rates", "none", "--output", str(tmp_path)]
    both = [*words, "--contenders", "dense", "topka"]
    assert main([*words, "--contenders", "dense"]) == 0
    assert main(both) == 0
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [one["run"] for one in records] == ["dense", "topka"]
    seconds = [point["seconds"] for point in records[0]["curve"]]
    assert 0 < seconds[0] < seconds[-1]
    assert "1.0" in (tmp_path / "accuracy.md").read_text()
    assert (tmp_path / "accuracy.png").exists()
    capfd.readouterr()
    assert main(both) == 0  # nothing is left to train
    assert "seed 0" not in capfd.readouterr().out
