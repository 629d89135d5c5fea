"""Report of the convergence benchmark: a table and a figure for each task, and which published orderings hold."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

from benchmarks.convergence.claims import orderings
from benchmarks.convergence.figures import plot
from benchmarks.convergence.results import Results
from benchmarks.convergence.runs import BETAS, SIZES, partial_name

NOTES = """\
Metric after the last step, over the whole test part: mean of the seeds (in brackets: how many) and, after ±, half the
distance from the smallest to the largest. To dense: to the dense run of the same momentum. MB sent: by a rank in the
whole training, mean of the ranks; reduction: of them, against dense. Horovod's own exchange counts no bytes; a ring
sends 2 (P-1)/P times the gradients'. Residual: what the memory of rank 0 keeps from step to step."""


def report(folder: Path) -> str:
    """Writes ``report.md`` and a figure for each task from ``result.json``; returns the text.

    Raises:
        ValueError: The folder has no result.json, or one of something else.
    """
    results = read(folder / "result.json")
    tables = [table(results, task) for task in results.tasks]
    text = "\n\n".join([*tables, NOTES, partial_table(results), orderings(results)]) + "\n"
    (folder / "report.md").write_text(text)
    for task in results.tasks:
        plot(results, task, folder / f"{task}.png")
    return text


def read(path: Path) -> Results:
    """The results of a file.

    Raises:
        ValueError: There is no such file, or it holds no results.
    """
    try:
        content = json.loads(path.read_text())
        return Results(content["ranks"], content["records"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no results ({type(error).__name__}: {error}): run `python -m benchmarks.convergence` first"
        ) from error


def table(results: Results, task: str) -> str:
    """The runs of a task as Markdown."""
    first = results.of(task, results.runs(task)[0])[0]
    lines = [
        f"## {task}",
        "",
        f"{first['parameters']:,} parameters, {results.ranks} ranks, {first['steps']} steps.",
        "",
        f"| run | compression | {first['metric']} | to dense | MB sent | reduction | residual |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join([*lines, *(_row(results, task, run) for run in results.runs(task))])


def partial_table(results: Results) -> str:
    """The digits' accuracy for every part of the error that is not fed back and every size of the sketch."""
    lines = [
        "## Partial feedback",
        "",
        "Accuracy on digits by the size of the sketch relative to the residual's.",
        "",
        f"| not fed back | {' | '.join(f'{size:.0%}' for size in SIZES)} |",
        f"| --- |{' ---: |' * len(SIZES)}",
    ]
    for beta in BETAS:
        cells = [_accuracy(results, partial_name(beta, size)) for size in SIZES]
        lines.append(f"| {f'β = {beta:g}' if beta else 'nothing (ConEF)'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _accuracy(results: Results, run: str) -> str:
    records = results.of("digits", run)
    return _metric(results, "digits", run)[0] if records else "not measured"


def _row(results: Results, task: str, run: str) -> str:
    records = results.of(task, run)
    cells = [
        run,
        f"`{records[0]['spec']}`",
        *_metric(results, task, run),
        f"{mean(record['bytes_sent'] for record in records) / 1e6:.2f}",
        f"{results.reduction(task, run):.1f}x",
        f"{records[0]['residual_bytes'] / 1e3:,.0f} KB",
    ]
    return f"| {' | '.join(cells)} |"


def _metric(results: Results, task: str, run: str) -> tuple[str, str]:
    """The metric and its difference to the dense baseline."""
    records, finals, diverged = results.of(task, run), results.finals(task, run), results.diverged(task, run)
    if diverged:
        return f"diverged ({diverged} of {len(records)})", ""
    scale, unit = (100, " %") if records[0]["metric"] == "accuracy" else (1, "")
    value, spread = scale * mean(finals), scale * (max(finals) - min(finals)) / 2
    dense = [] if records[0]["baseline"] == run else results.baseline(task, run)
    difference = f"{value - scale * mean(dense):+.2f}" if dense else ""
    return f"{value:.2f}{unit} ± {spread:.2f} ({len(records)})", difference
