"""The preset and its rivals on 4, 16 and 64 ranks: list of trainings, resuming, tables and figure."""

from __future__ import annotations

import json
from pathlib import Path

import launch
import pytest
from matplotlib.figure import Figure

from benchmarks.convergence.report import filled
from benchmarks.convergence.results import read_records, records_path
from benchmarks.convergence.scaling import build_parser, jobs, main, published
from benchmarks.convergence.scaling_report import by_ranks, draw, tables, write

ROOT = Path(__file__).resolve().parents[2]


def asked(*words):
    return jobs(build_parser().parse_args(words))


def record(job, final, share):
    """Record of a job that sent a share of the bytes of a dense ring."""
    dense = 8 * 1000 * (job.ranks - 1) / job.ranks
    sent = {"step": job.steps, "bytes_sent": share * dense * job.steps}
    metric = "perplexity" if job.task == "stdlib" else "accuracy"
    outcome = {"metric": metric, "final": final, "parameters": 1000, "curve": [sent], "bytes_sent": sent["bytes_sent"]}
    return {**job.settings(), "ranks": job.ranks, **outcome}


def test_flags_select_parts_of_everything():
    found = asked("--ranks", "16", "--tasks", "stdlib", "--runs", "dense-adam,recommended-gtopk", "--seeds", "2")
    assert set(found) < set(asked())
    assert [(job.run.name, job.seed) for job in found] == [
        ("dense-adam", 0),
        ("recommended-gtopk", 0),
        ("dense-adam", 1),
    ]


@pytest.mark.parametrize("words", [["--ranks", "8"], ["--tasks", "digits"], ["--runs", "topka"]])
def test_other_parts_are_refused_and_the_known_ones_listed(words, capsys):
    with pytest.raises(SystemExit):
        asked(*words)
    assert words[1] in capsys.readouterr().err


def test_the_report_fills_a_page_and_draws_the_figure(tmp_path):
    records = [record(job, None if "spardl" in job.run.name else 20 + job.seed, 0.1) for job in asked()]
    page = tmp_path / "page.md"
    page.write_text("begin\n<!-- begin scaling -->\nold\n<!-- end scaling -->\nend\n")
    text = write(asked(), records, tmp_path, [page])
    assert "| SparDL | diverged (1 of 1) |" in text
    assert page.read_text() == f"begin\n<!-- begin scaling -->\n\n{text}\n\n<!-- end scaling -->\nend\n"
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_joins_dense_training_and_the_candidates_of_the_preset_only():
    shares = {"dense-nesterov": 1, "recommended": 1 / 32, "recommended-oktopk": 1 / 117, "recommended-gtopk": 1 / 261}
    wanted = asked("--tasks", "stdlib", "--ranks", "16", "--seeds", "1", "--runs", ",".join(shares))
    results = by_ranks(wanted, [record(job, 20, shares[job.run.name]) for job in wanted])
    axes = Figure().subplots()
    draw(axes, results[16], "SGD", 16)
    [line] = [list(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) > 1]
    assert line == pytest.approx([1 / 117, 1 / 32, 1])


def test_a_folder_without_trainings_is_named(tmp_path, capsys):
    assert main(["--report", str(tmp_path), "--steps", "7"]) == 1
    assert "no training has a record" in capsys.readouterr().err


def test_the_published_page_shows_the_published_records():
    page = (ROOT / "docs" / "scaling.md").read_text()
    records = published() + read_records(records_path(ROOT / "docs" / "data" / "scaling"))
    assert filled([page], {"scaling": tables(by_ranks(asked(), records))}) == [page]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_parts_are_trained_once(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    short = ("--tasks", "stdlib", "--ranks", "4", "--steps", "1", "--seeds", "1")
    words = ["-m", "benchmarks.convergence.scaling", *short, "--output", str(tmp_path), "--runs"]
    path = tmp_path / "records.jsonl"
    for runs in ("recommended-oktopk", "recommended-oktopk,dense-nesterov"):
        before = path.read_text() if path.exists() else ""
        done = launch.python(*words, runs, limit=290)
        assert done.returncode == 0, done.stdout + done.stderr
        assert path.read_text().startswith(before)
        assert done.stdout.count(" on 4 ranks, seed 0: perplexity ") == 1
    found = list(map(json.loads, path.read_text().splitlines()))
    assert [(one["run"], one["ranks"]) for one in found] == [("recommended-oktopk", 4), ("dense-nesterov", 4)]
    assert "| SGD | dense, Nesterov momentum |" in (tmp_path / "report.md").read_text()
