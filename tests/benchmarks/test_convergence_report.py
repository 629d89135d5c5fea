"""Report of the convergence benchmark: averages, intervals, verdicts, tables, figures."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from scipy.stats import ttest_1samp

from benchmarks.convergence.claims import BETTER, CLAIMS, HOLDS, UNDECIDED, WORSE, Claim, fewer, near, ratio, worse
from benchmarks.convergence.report import filled, report, sections, summaries, table, verdicts
from benchmarks.convergence.results import Interval, Results, read_records
from benchmarks.convergence.runs import RUNS


def record(task, run, finals, bytes_sent):
    """A run's records, one for each seed; a final of None diverged before its second evaluation."""
    return [
        {
            "task": task,
            "run": run,
            "seed": seed,
            "spec": RUNS[run].spec,
            "steps": 20,
            "ranks": 4,
            "metric": "accuracy" if task == "fashion-mnist" else "perplexity",
            "parameters": 1000,
            "final": final,
            "bytes_sent": bytes_sent if final is not None else bytes_sent / 2,
            "entries_sent": 10.0,
            "residual_bytes": 4000,
            "stages": {"select": 2.0 + seed, "agree": 1.0, "exchange": 1.0, "apply": 0.5},
            "curve": [
                {
                    "step": step,
                    "value": final or 0.1,
                    "train_loss": 1.0,
                    "bytes_sent": bytes_sent * step / 20,
                    "entries_sent": bytes_sent * step / 20 / (4 if run == "dense" else 8),
                }
                for step in ((10, 20) if final is not None else (10,))
            ],
            "seconds": 1.0,
        }
        for seed, final in enumerate(finals)
    ]


def write(folder, records):
    (folder / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


@pytest.fixture
def results():
    records = record("fashion-mnist", "dense", [0.9, 0.92, 0.94], 4e6)
    records += record("fashion-mnist", "topka", [0.899, 0.9185, 0.9392], 1e5)  # 0.1, 0.15, 0.08 points behind
    records += record("fashion-mnist", "gtopk", [0.88, 0.90, 0.925], 5e4)
    records += record("fashion-mnist", "oktopk", [0.9, 0.905, 0.945], 5e4)
    records += record("fashion-mnist", "dgc-10", [0.9, None, 0.9], 1e5)
    records += record("stdlib", "dense", [20.0], 4e6)
    records += record("stdlib", "topka", [22.0], 1e6)
    return Results(records)


def cells(text, run):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {run} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_holds_mean_and_comparison_with_dense_on_each_task(results):
    text = table(results, ["dense", "topka", "gtopk"])
    row = "`topka:density=0.01` | 91.89 % (3) | +0.11 ± 0.02 | 1/40.0 | 22.00 (1) | +10.00 | 1/4.0 | 4 KB | 2.5"
    assert cells(text, "topka")[1:] == row.split(" | ")
    assert cells(text, "dense")[2:6] == ["92.00 % (3)", "", "1/1.0", "20.00 (1)"]
    assert cells(text, "gtopk")[5:8] == ["", "", ""], "not measured there"


def test_divergence_is_reported_and_does_not_count_as_saving(results):
    assert cells(table(results, ["dgc-10"]), "dgc-10")[2:4] == ["diverged (1 of 3)", ""]
    assert results.reduction("fashion-mnist", "dgc-10") == pytest.approx(40)


def test_a_loss_is_points_of_accuracy_or_percent_of_perplexity_seed_by_seed(results):
    loss = results.loss("fashion-mnist", "topka")
    assert (loss.middle, loss.seeds) == (pytest.approx(0.11), 3)
    assert loss.error == pytest.approx(0.0360555 / math.sqrt(3), rel=1e-4)
    assert results.loss("stdlib", "topka").middle == pytest.approx(10)
    assert math.isinf(results.loss("stdlib", "topka").half), "one seed says nothing about the next"
    assert results.loss("fashion-mnist", "dgc-10").middle == math.inf
    assert results.loss("fashion-mnist", "topka", "gtopk").middle == pytest.approx(-1.72333, rel=1e-4)


def test_only_seeds_that_both_runs_have_are_compared(results):
    more = Results([*results.records, *record("fashion-mnist", "fp16", [0.9, 0.92, 0.94, 0.5], 1)])
    assert more.loss("fashion-mnist", "fp16").middle == pytest.approx(0)
    assert more.loss("fashion-mnist", "fp16").seeds == 3


@pytest.mark.parametrize("numbers", [[0.1, 0.5], [0.2, 0.1, 0.4, -0.3], [1.0, 1.5, 0.9, 1.1, 1.2]])
def test_an_interval_contains_what_a_t_test_at_5_percent_does_not_reject(numbers):
    interval = Interval.of(numbers)
    for end, side in ((interval.low, "greater"), (interval.high, "less")):
        assert ttest_1samp(numbers, end, alternative=side).pvalue == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("claim", "word"),
    [
        (near("", "topka", "dense"), HOLDS),
        (near("", "topka", "dense", {"accuracy": 0.2, "perplexity": 1}), HOLDS),
        (near("", "topka", "dense", {"accuracy": 0.15, "perplexity": 1}), UNDECIDED),
        (near("", "topka", "dense", {"accuracy": 0.04, "perplexity": 1}), WORSE),
        (near("", "gtopk", "dense"), WORSE),
        (near("", "dense", "gtopk"), BETTER),  # better by more than the tolerance is not near either
        (near("", "oktopk", "dense"), UNDECIDED),
        (near("", "dgc-10", "dense"), WORSE),
        (worse("", "gtopk", "dense"), HOLDS),
        (worse("", "dense", "gtopk"), BETTER),
        (worse("", "gtopk", "dense", by=6), BETTER),
        (worse("", "gtopk", "dense", by=3.5), UNDECIDED),
        (worse("", "oktopk", "dense"), UNDECIDED),
        (worse("", "dgc-10", "dense", by=9), HOLDS),
        (fewer(Results.bytes_per_step, "", "topka", "dense", 39), HOLDS),
        (fewer(Results.bytes_per_step, "", "topka", "dense", 41), WORSE),
        (fewer(Results.late_bytes_per_step, "", "topka", "dense", 39), HOLDS),
        (fewer(Results.late_bytes_per_step, "", "topka", "dense", 41), WORSE),
        (fewer(Results.floats_per_step, "", "topka", "dense", 79), HOLDS),
        (fewer(Results.floats_per_step, "", "topka", "dense", 81), WORSE),
    ],
)
def test_a_verdict_says_whether_a_run_ends_better_or_worse_than_claimed(results, claim, word):
    verdict = dict(claim.verdicts(results))["fashion-mnist"]
    assert verdict.word == word, verdict.numbers


def test_each_claim_is_judged_on_every_task_that_has_its_runs_and_one_seed_decides_nothing(results):
    claims = [
        near("topka is near", "topka", "dense"),
        worse("gtopk is worse", "gtopk", "dense"),
        worse("topka is worse", "topka", "dense"),
        ratio(Results.bytes_per_step, "bytes of dense over those of topka", "topka", "dense"),
        Claim("nobody knows", ("powersgd-1",), near("", "powersgd-1", "dense").check),
    ]
    assert verdicts(results, claims).splitlines() == [
        "| claim | fashion-mnist | stdlib |",
        "| --- | --- | --- |",
        "| topka is near | **holds** (+0.11 ± 0.06) | **undecided** (+10.00 one seed) |",
        "| gtopk is worse | **holds** (+1.83 ± 0.49) |  |",
        "| topka is worse | **holds** (+0.11 ± 0.06) | **undecided** (+10.00 one seed) |",
        "| bytes of dense over those of topka | 40.0x | 4.0x |",
    ]


def test_claims_are_about_runs_that_exist_and_are_made_on_one_task_together():
    assert CLAIMS.keys() <= {run.group for run in RUNS.values()}
    for claim in itertools.chain(*CLAIMS.values()):
        assert {*claim.runs} <= RUNS.keys()
        assert set.intersection(*({*RUNS[run].tasks} for run in claim.runs)), claim.name


def test_every_run_is_compared_with_a_dense_one_of_its_tasks():
    for run in RUNS.values():
        assert RUNS[run.baseline].spec == "none"
        assert {*run.tasks} <= {*RUNS[run.baseline].tasks} or run.group == "partial"


@pytest.mark.full
def test_the_report_is_rewritten_from_the_records(results, tmp_path):
    write(tmp_path, results.records)
    parts = sections(results) | summaries(results)
    marks = [f"<!-- begin {source} -->\nold\n<!-- end {source} -->\n" for source in parts]
    pages = [tmp_path / "results.md", tmp_path / "ablations.md"]
    for page, its in zip(pages, (marks[::2], marks[1::2]), strict=True):
        page.write_text(f"# Page\n{''.join(its)}end\n")
    text = report(tmp_path)
    assert (tmp_path / "report.md").read_text() == text
    assert report(tmp_path, pages) == text
    contents = [page.read_text() for page in pages]
    for number, (source, part) in enumerate(parts.items()):
        assert f"<!-- begin {source} -->\n\n{part}\n\n<!-- end {source} -->\n" in contents[number % 2]
    for content in contents:
        assert "\nold\n" not in content
        assert content.endswith("\nend\n")
    assert filled(contents, parts) == contents
    for name in ("fashion-mnist", "stdlib", "grid"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_source_needs_one_place_on_all_pages(results):
    for places in (0, 2):
        pages = ["# Page"] * (2 - places) + ["<!-- begin dense -->\n<!-- end dense -->"] * places
        with pytest.raises(ValueError, match=rf"{places} pages have a place for .dense.: .*<!-- begin dense -->"):
            filled(pages, sections(results))


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[1]", "3"])
def test_a_folder_without_records_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "records.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"records\.jsonl holds no records"):
        report(tmp_path)


def test_the_published_pages_show_the_published_records():
    docs = Path(__file__).resolve().parents[2] / "docs"
    names = (folder + page for folder in ("", "appendix/") for page in ("results.md", "ablations.md"))
    pages, results = [(docs / name).read_text() for name in names], Results(read_records(docs / "data/records.jsonl"))
    assert filled(pages, sections(results) | summaries(results)) == pages


def test_a_source_of_which_only_the_baseline_was_trained_is_not_measured(results):
    parts = sections(results)
    assert parts["PowerSGD"] == parts["ConEF"] == "Not measured yet."
    assert "| topka |" in parts["top-k"]


def test_the_users_configuration_is_compared_with_the_published_runs_of_the_same_task_and_length(tmp_path):
    spec, points = "topka:density=0.02", {"value": 0.5, "train_loss": 1.0, "entries_sent": 1.0}
    mine = {**record("fashion-mnist", "topka", [0.9], 1e5)[0], "run": spec, "spec": spec, "steps": 1170}
    mine["curve"] = [{"step": step, "bytes_sent": step * 1e3, **points} for step in (585, 1170)]
    write(tmp_path, [mine])
    text = report(tmp_path).partition("## Own configurations")[2]
    assert cells(text, spec)[2] == "90.00 % (1)"
    assert cells(text, spec)[3] == f"{100 * (0.9209 - 0.9):+.2f}"  # dense with this seed
    assert [cells(text, name)[2][-3:] for name in ("dense", "topka")] == ["(5)", "(3)"]
    assert "| recommended |" not in text
    assert cells(report(tmp_path, against=["recommended"]).partition("## Own configurations")[2], "recommended")
    write(tmp_path, [{**mine, "steps": 7}])
    assert "| dense |" not in report(tmp_path)
