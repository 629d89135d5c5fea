"""Report of the convergence benchmark; the published pages are an example of every table and verdict."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from scipy.stats import ttest_1samp

from benchmarks.convergence.claims import BETTER, CLAIMS, HOLDS, UNDECIDED, WORSE, near, worse
from benchmarks.convergence.report import filled, report, sections, summaries
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
    records += record("fashion-mnist", "topka", [0.899, 0.9185, 0.9392], 1e5)
    records += record("fashion-mnist", "gtopk", [0.88, 0.90, 0.925], 5e4)
    records += record("fashion-mnist", "dgc-10", [0.9, None, 0.9], 1e5)
    records += record("stdlib", "dense", [20.0], 4e6)
    records += record("stdlib", "topka", [22.0], 1e6)
    return Results(records)


def cells(text, run):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {run} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("numbers", [[0.1, 0.5], [0.2, 0.1, 0.4, -0.3], [1.0, 1.5, 0.9, 1.1, 1.2]])
def test_an_interval_contains_what_a_t_test_at_5_percent_does_not_reject(numbers):
    interval = Interval.of(numbers)
    for end, side in ((interval.low, "greater"), (interval.high, "less")):
        assert ttest_1samp(numbers, end, alternative=side).pvalue == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("claim", "word"),
    [
        (worse("", "gtopk", "dense", by=6), BETTER),
        (worse("", "gtopk", "dense", by=3.5), UNDECIDED),
        (worse("", "dgc-10", "dense", by=9), HOLDS),
        (near("", "dgc-10", "dense"), WORSE),
    ],
)
def test_a_verdict_counts_tolerances_and_takes_divergence_for_an_infinite_loss(results, claim, word):
    assert dict(claim.verdicts(results))["fashion-mnist"].word == word


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
