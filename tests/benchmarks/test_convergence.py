"""Command line of the convergence benchmark, and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import launch
import pytest

from benchmarks.convergence.__main__ import main
from benchmarks.convergence.arguments import build_parser, jobs
from benchmarks.convergence.runs import DENSE, RUNS, Job

ROOT = Path(__file__).resolve().parents[2]


def asked(*words):
    return jobs(build_parser().parse_args(words))


def test_everything_is_every_run_on_every_task_with_every_seed():
    found = asked()
    assert len(found) == len(set(found)) == 3 * sum(len(run.tasks) for run in RUNS.values())
    assert {job.steps for job in found} == {300}


def test_quick_is_less_of_the_same():
    found = asked("--quick")
    assert {(job.task, job.run, job.seed) for job in found} < {(job.task, job.run, job.seed) for job in asked()}
    assert {job.run.name for job in found} >= {DENSE, "topka"}
    assert {job.steps for job in found} == {200}


def test_what_is_given_wins_over_quick():
    found = asked("--quick", "--runs", "dense-plain", "--tasks", "lstm", "--seeds", "2", "--steps", "7")
    assert found == [Job("lstm", RUNS["dense-plain"], seed, 7) for seed in (0, 1)]


@pytest.mark.parametrize("words", [["--runs", "dense,topkb"], ["--tasks", "digitz"], ["--seeds", "0"]])
def test_unknown_names_are_refused_and_the_known_ones_listed(words, capsys):
    with pytest.raises(SystemExit):
        asked(*words)
    assert words[1].split(",")[-1] in capsys.readouterr().err


def test_a_record_is_of_a_training_with_the_same_settings_only():
    job = Job("digits", RUNS["topka"], 0, 10)
    record = {**job.settings(), "final": 0.5}
    assert job.made(record)
    for name, other in {"steps": 20, "spec": "topka:density=0.1", "momentum": 0.0, "seed": 1}.items():
        assert not job.made({**record, name: other})


def test_a_folder_without_results_is_named(tmp_path, capsys):
    assert main(["--report", str(tmp_path)]) == 1
    assert f"{tmp_path / 'result.json'} holds no results" in capsys.readouterr().err


# What the command line starts, on two ranks.
ON_TWO = "from benchmarks.convergence import __main__ as one; one.RANKS = 2; raise SystemExit(one.main())"


def test_what_is_missing_is_trained_and_everything_written(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    dense = {**Job("digits", RUNS[DENSE], seed=0, steps=4).settings(), "metric": "accuracy", "parameters": 1}
    dense |= {
        "final": 0.5,
        "bytes_sent": 1e9,
        "residual_bytes": 0,
        "curve": [{"step": 4, "value": 0.5, "bytes_sent": 1e9}],
    }
    (tmp_path / "result.json").write_text(json.dumps({"ranks": 2, "records": [dense]}))
    words = ["-c", ON_TWO, "--tasks", "digits", "--steps", "4", "--seeds", "1", "--resume"]
    done = launch.python(*words, "--runs", "dense,topka", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1/1 digits topka seed 0: accuracy" in done.stdout
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["records"][0] == dense, "it is not trained again"
    assert [record["run"] for record in content["records"]] == ["dense", "topka"]
    assert content["ranks"] == 2
    assert "| topka | `topka:density=0.01` |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
