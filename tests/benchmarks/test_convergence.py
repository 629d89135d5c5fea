"""Command line of the convergence benchmark, and a short run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import launch
import pytest

import horovod_sparse as hvs
from benchmarks.convergence import worker
from benchmarks.convergence.__main__ import main
from benchmarks.convergence.arguments import build_parser, jobs
from benchmarks.convergence.results import Results
from benchmarks.convergence.runs import DENSE, LARGE, RUNS, SMALL, Job

ROOT = Path(__file__).resolve().parents[2]


def asked(*words):
    return jobs(build_parser().parse_args(words))


def test_by_default_every_run_is_trained_on_its_tasks_with_its_seeds():
    found = asked()
    assert len(found) == len(set(found)) == sum(run.seeds_on(task) for run in RUNS.values() for task in run.tasks)
    assert {job.steps for job in found if job.task == "fashion-mnist"} == {1170, 4 * 1170}
    assert [job.seed for job in found] == sorted(job.seed for job in found), "early results show the whole picture"


def test_the_headline_is_a_part_of_everything_with_five_seeds():
    found = asked("--headline")
    assert set(found) < set(asked())
    assert {job.task for job in found} == {*LARGE}
    for job in found:
        assert sum(other.run == job.run and other.task == job.task for other in found) == 5


def test_quick_is_the_small_tasks_with_one_seed():
    found = asked("--quick")
    assert {job.task for job in found} == {*SMALL}
    assert {job.seed for job in found} == {0}
    assert {job.run.name for job in found} >= {DENSE, "topka"}
    assert {job.steps for job in found} == {200}


def test_named_runs_tasks_and_seeds_are_trained():
    found = asked("--runs", "topka-10", "--tasks", "stdlib", "--seeds", "2", "--steps", "7")
    assert found == [Job("stdlib", RUNS["topka-10"], seed, 7) for seed in (0, 1)]
    assert asked("--runs", "dense", "--tasks", "lstm", "--seeds", "1") == [Job("lstm", RUNS["dense"], 0, 200)]
    wide = asked("--runs", "dense", "--tasks", "lstm", "--seeds", "1", "--ranks", "16", "--batch", "2")
    assert wide == [Job("lstm", RUNS["dense"], 0, 200, ranks=16, batch=2)]


@pytest.mark.parametrize("words", [["--runs", "dense,topkb"], ["--tasks", "digitz"], ["--seeds", "0"]])
def test_unknown_names_are_refused_and_the_known_ones_listed(words, capsys):
    with pytest.raises(SystemExit):
        asked(*words)
    assert words[1].split(",")[-1] in capsys.readouterr().err


def test_a_record_is_of_a_training_with_the_same_settings_only():
    job = Job("digits", RUNS["topka"], 0, 10)
    record = {**job.settings(), "final": 0.5}
    assert job.made(record)
    for name, other in {
        "steps": 20,
        "spec": "topka:density=0.1",
        "optimizer": "adam",
        "seed": 1,
        "ranks": 8,
        "batch": 2,
    }.items():
        assert not job.made({**record, name: other})


def test_a_figure_shows_each_run_at_the_learning_rate_with_most_seeds_then_the_best():
    finals = {"dense@1": [25.0, 26.0], "dense@2": [27.0, 28.0], "dense": [20.0], "diloco-8@1": [30.0]}
    records = [
        {"task": "stdlib", "run": run, "seed": seed, "final": final}
        for run, values in finals.items()
        for seed, final in enumerate(values)
    ]
    best = Results(records).at_best_rates("stdlib")
    assert best.finals("stdlib", "dense") == {0: 25.0, 1: 26.0}
    assert best.finals("stdlib", "diloco-8") == {0: 30.0}
    assert len(best.records) == 3


def test_a_folder_without_results_is_named(tmp_path, capsys):
    assert main(["--report", str(tmp_path)]) == 1
    assert f"{tmp_path / 'records.jsonl'} holds no records" in capsys.readouterr().err


@pytest.mark.full
def test_missing_runs_are_trained_and_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    dense = {**Job("digits", RUNS[DENSE], seed=0, steps=4).settings(), "metric": "accuracy", "parameters": 1}
    dense |= {
        "ranks": 2,
        "final": 0.5,
        "bytes_sent": 1e9,
        "residual_bytes": 0,
        "stages": {"select": 0.0, "apply": 0.0},
        "curve": [{"step": 4, "value": 0.5, "bytes_sent": 1e9}],
    }
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(dense) + "\n")
    words = ["-m", "benchmarks.convergence", "--tasks", "digits", "--steps", "4", "--seeds", "1", "--ranks", "2"]
    done = launch.python(*words, "--runs", "dense,topka,powersgd-2", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1/1 digits topka on 2 ranks, seed 0: accuracy" in done.stdout
    records = list(map(json.loads, path.read_text().splitlines()))
    assert records[0] == dense, "it is not trained again"
    assert [(record["run"], record.get("ranks")) for record in records] == [("dense", 2), ("topka", 2)]
    assert "| topka | `topka:density=0.01` |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_no_run_starts_after_the_minutes_that_were_asked_for(tmp_path, capsys):
    options = build_parser().parse_args(["--output", str(tmp_path), "--minutes", "0"])
    digits = [Job("digits", RUNS[DENSE], seed=seed, steps=1) for seed in (0, 1)]
    worker.train_all(options, digits, lambda *_: pytest.fail("a run has started"), lambda value: value, first=True)
    assert capsys.readouterr().out == "2 runs are left for the next invocation\n"


@pytest.mark.nightly
def test_a_rule_of_the_users_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    spec = "topka:density=0.01,sparsifier=sorttopk"
    words = ["--tasks", "digits", "--steps", "4", "--seeds", "1", "--ranks", "2", "--output", str(tmp_path)]
    words += ["--rules", "examples.sorted_topk", "--compression", spec]
    done = launch.python("-m", "benchmarks.convergence", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {spec} | `{spec}` |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--rules", "no_such_module"], "No module named"), (["--compression", "topkb"], "unknown .*topkb")],
)
def test_unknown_modules_and_compressions_are_refused_before_training(words, message, capsys):
    assert main(words) == 1
    assert re.search(message, capsys.readouterr().err)


def test_windows_are_parts_of_the_training():
    assert Job("digits", RUNS["gravac-0.7"], 0, 80).spec.endswith("window=10")
    assert Job("digits", RUNS["topka"], 0, 80).spec == RUNS["topka"].spec
    for run in RUNS.values():
        if not run.spec.startswith("powersgd"):
            hvs.parse(Job("digits", run, 0, 80).spec)
