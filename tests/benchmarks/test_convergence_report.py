"""Report of the convergence benchmark: averages, table, verdicts, figures."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.convergence.claims import CLAIMS, Claim, fewer_bytes, near, orderings, worse
from benchmarks.convergence.report import read, report, table
from benchmarks.convergence.results import Results
from benchmarks.convergence.runs import RUNS


def record(task, run, finals, bytes_sent, group="group", baseline="dense"):
    """A run's records, one for each seed; a final of None diverged before its second evaluation."""
    metric = "accuracy" if task == "digits" else "perplexity"
    return [
        {
            "task": task,
            "run": run,
            "seed": seed,
            "group": group,
            "baseline": baseline,
            "spec": f"{run}:density=0.01",
            "steps": 20,
            "metric": metric,
            "parameters": 1000,
            "final": final,
            "bytes_sent": bytes_sent if final is not None else bytes_sent / 2,
            "entries_sent": 10.0,
            "residual_bytes": 4000,
            "curve": [
                {"step": step, "value": final or 0.1, "train_loss": 1.0, "bytes_sent": bytes_sent * step / 20}
                for step in ((10, 20) if final is not None else (10,))
            ],
            "seconds": 1.0,
        }
        for seed, final in enumerate(finals)
    ]


@pytest.fixture
def results():
    records = record("digits", "dense", [0.9, 0.92, 0.94], 4e6, group="dense")
    records += record("digits", "late", [0.5, 0.5, 0.5], 1e6, group="other")
    records += record("digits", "sparse", [0.88, 0.9, 0.89], 1e5)
    records += record("digits", "wild", [0.9, None, 0.9], 1e5)
    records += record("lstm", "dense", [20.0], 4e6, group="dense")
    records += record("lstm", "sparse", [22.0], 1e6)
    return Results(4, records)


def cells(text, run):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {run} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_holds_mean_spread_and_comparison_with_dense(results):
    text = table(results, "digits")
    assert cells(text, "sparse")[2:] == ["89.00 % ± 1.00 (3)", "-3.00", "0.10", "40.0x", "4 KB"]
    assert cells(text, "dense")[2:] == ["92.00 % ± 2.00 (3)", "", "4.00", "1.0x", "4 KB"]
    assert cells(table(results, "lstm"), "sparse")[2:4] == ["22.00 ± 0.00 (1)", "+2.00"]


def test_divergence_is_told_and_does_not_count_as_saving(results):
    assert cells(table(results, "digits"), "wild")[2:4] == ["diverged (1 of 3)", ""]
    assert results.reduction("digits", "wild") == pytest.approx(40)


def test_runs_of_a_group_stand_together(results):
    again = Results(4, [*results.records, *record("digits", "new", [0.9], 1, group="other")])
    assert again.runs("digits") == ["dense", "late", "new", "sparse", "wild"]


def test_a_loss_is_points_of_accuracy_or_percent_of_perplexity(results):
    assert results.loss("digits", "sparse") == pytest.approx(3)
    assert results.loss("lstm", "sparse") == pytest.approx(10)
    assert results.loss("digits", "wild") == math.inf
    assert results.loss("digits", "dense") == 0
    assert math.isnan(Results(4, record("digits", "sparse", [0.9], 1)).loss("digits", "sparse"))


def test_a_run_is_compared_with_its_own_baseline(results):
    plain = record("digits", "plain", [0.8], 4e6, baseline="plain")
    slow = record("digits", "slow", [0.75], 1e6, baseline="plain")
    both = Results(4, [*results.records, *plain, *slow])
    assert both.loss("digits", "slow") == pytest.approx(5)
    assert cells(table(both, "digits"), "slow")[3] == "-5.00"
    assert cells(table(both, "digits"), "plain")[3] == ""
    alone = Results(4, [*results.records, *slow])
    assert cells(table(alone, "digits"), "slow")[3] == ""
    assert "not measured" in orderings(alone, [Claim("slow", ["slow"], near("slow", "dense", within=9))])


@pytest.mark.parametrize(
    ("check", "holds"),
    [
        (near("sparse", "dense", within=4), True),
        (near("sparse", "dense", within=2), False),
        (near("dense", "sparse", within=0), True),
        (near("wild", "dense", within=50), False),
        (worse("late", than="sparse", by=35), True),
        (worse("late", than="sparse", by=45), False),
        (worse("wild", than="sparse", by=45), True),
        (worse("wild", than="wild", by=0), False),
        (fewer_bytes("sparse", "dense", factor=39), True),
        (fewer_bytes("sparse", "dense", factor=41), False),
    ],
)
def test_checks_compare_the_means(results, check, holds):
    assert check(results, "digits").holds is holds


def test_each_claim_is_judged_on_every_task_that_has_its_runs(results):
    claims = [
        Claim("sparse is near", ["sparse"], near("sparse", "dense", within=5)),
        Claim("late is late", ["late", "sparse"], worse("late", than="sparse", by=1)),
        Claim("nobody knows", ["unknown"], near("unknown", "dense", within=5)),
    ]
    assert orderings(results, claims).splitlines()[2:] == [
        "- sparse is near:",
        "  - digits: holds (sparse +3.0 %, dense +0.0 %)",
        "  - lstm: DOES NOT HOLD (sparse +10.0 %, dense +0.0 %)",
        "- late is late:",
        "  - digits: holds (late +42.0 %, sparse +3.0 %)",
        "- nobody knows: not measured",
    ]


def test_claims_are_about_runs_that_exist():
    for claim in CLAIMS:
        assert {*claim.runs} <= RUNS.keys()


def test_every_run_is_compared_with_a_dense_one():
    assert {RUNS[run.baseline].spec for run in RUNS.values()} == {"none"}


def test_the_report_is_written_anew_from_the_numbers(results, tmp_path):
    content = {"ranks": 4, "versions": {}, "records": results.records}
    (tmp_path / "result.json").write_text(json.dumps(content))
    text = report(tmp_path)
    assert (tmp_path / "report.md").read_text() == text
    assert table(results, "digits") in text
    assert "## Published orderings" in text
    for task in ("digits", "lstm"):
        assert (tmp_path / f"{task}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, "", "{}", "[1]"])
def test_a_folder_without_results_is_named(tmp_path, content):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"result\.json holds no results .*benchmarks\.convergence"):
        read(path)
