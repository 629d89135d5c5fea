"""`horovod-sparse report`: compares trainings that wrote statistics, as a table, a PNG and a single HTML file.

A RUN is a folder with a statistics.jsonl written by hvs.metrics.Log. The figure shows loss and accuracy over the bytes
sent, densities and norms over the steps, and the parts of a step.
"""

from __future__ import annotations

import argparse
import html
import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from horovod_sparse.cli import plot
from horovod_sparse.cli.figures import draw, png
from horovod_sparse.cli.runs import STAGES, Run, read_runs

NOTES = """\
Numbers are those of the rank that wrote them. Loss and accuracy: the last ones. Others: median over the records.
* These run on a thread of their own beside backward: they do not add up to the whole step. "agree" is a small message
that waits for the slowest rank; "hidden" is the share of their time before the last gradient was handed in; "wait" is
what is left to do once backward has ended. A dense exchange by Horovod or DDP shows nowhere else, and its bytes are
computed: 2 (P-1)/P times the gradients' size, which a ring sends."""

# Rows of the table: label, format, and the number.
_ROWS: tuple[tuple[str, str, Callable[[Run], float | None]], ...] = (
    ("steps", ",.0f", lambda run: run.last("step")),
    ("loss", ".4f", lambda run: run.last("loss")),
    ("test loss", ".4f", lambda run: run.last("test_loss")),
    ("accuracy", ".2%", lambda run: run.last("accuracy")),
    ("bytes sent per step and rank", ",.0f", lambda run: run.per_step("total/bytes_sent")),
    ("ratio to dense", ".3g", lambda run: run.middle("total/ratio_to_dense")),
    ("density", ".3g", lambda run: run.middle("total/density")),
    ("gain", ".3g", lambda run: run.middle("total/gain")),
    ("residual over gradient", ".3g", lambda run: _ratio(run, "total/residual_norm", "total/gradient_norm")),
    ("exchange hidden", ".0%", lambda run: _hidden(run)),
    ("samples/s", ",.0f", lambda run: run.middle("samples_per_second")),
)


def add_parser(subparsers: Any) -> None:
    """Adds this subcommand."""
    about = str(__doc__).partition(": ")[2]
    parser = subparsers.add_parser("report", help="compare trainings that wrote statistics", description=about)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder with a statistics.jsonl")
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), help="folder for report.png, .html and .json (default: runs)"
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Prints the table and writes the files; returns 0."""
    try:
        runs = read_runs(options.runs)
        options.output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        options.parser.error(str(error))
    problem = plot.unwritable(plot=options.output / "report.png")
    if problem:
        options.parser.error(problem)
    image = png(draw(runs))
    (options.output / "report.png").write_bytes(image)
    (options.output / "report.html").write_text(page(runs, image))
    (options.output / "report.json").write_text(json.dumps(summary(runs), indent=2) + "\n")
    print(text(runs))
    for name, points in differences(runs).items():
        print(f"{name}: accuracy {points:+.2f} points against dense")
    print(f"\n{NOTES}\n\nReport: {options.output / 'report.html'}, its figure: report.png, its numbers: report.json")
    return 0


def table(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Rows of label and one cell for each run; "-" where a number was not written."""
    rows = [("", [one.name for one in runs])]
    rows += [
        (name, [str(one.about.get(name, "-")) for one in runs])
        for name in ("frontend", "compression")
        if any(name in one.about for one in runs)
    ]
    for label, layout, number in _ROWS:
        values = [number(one) for one in runs]
        rows.append((label, ["-" if value is None else format(value, layout) for value in values]))
    rows.append(("time per step in ms", ["" for _ in runs]))
    for name, _, beside in STAGES:
        times = [one.ms()[name] for one in runs]
        rows.append((f"  {name}{' *' if beside else ''}", ["-" if ms is None else f"{ms:.2f}" for ms in times]))
    return rows


def text(runs: Sequence[Run]) -> str:
    """The table as aligned text."""
    rows = table(runs)
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(runs))]
    first = max(len(label) for label, _ in rows)
    lines = []
    for label, cells in rows:
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([f"{label:<{first}}", *aligned]).rstrip())
    return "\n".join([lines[0], "-" * (first + sum(width + 2 for width in widths)), *lines[1:]])


def page(runs: Sequence[Run], image: bytes) -> str:
    """The report as HTML that needs no other file."""
    head, *rows = [
        f"<th>{html.escape(label.strip())}</th>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        for label, cells in table(runs)
    ]
    settings = "".join(
        f"<details><summary>{html.escape(one.name)}</summary><pre>{html.escape(json.dumps(one.about, indent=2))}</pre>"
        "</details>"
        for one in runs
    )
    return _PAGE.format(
        image=b64encode(image).decode(),
        head=head,
        rows="".join(f"<tr>{row}</tr>\n" for row in rows),
        notes=html.escape(NOTES).replace("\n* ", "<br>* "),
        settings=settings,
    )


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The table's numbers: shares as fractions, bytes and ms for a step and rank."""
    numbers = {
        one.name: {
            "about": one.about,
            **{label: number(one) for label, _, number in _ROWS},
            "ms_per_step": one.ms(),
        }
        for one in runs
    }
    return {"runs": numbers, "accuracy_minus_dense_points": differences(runs)}


def differences(runs: Sequence[Run]) -> dict[str, float]:
    """Accuracy minus that of the first dense run of the same data and model, in percentage points.

    Runs without such a dense run, and the dense run itself, are left out.
    """
    known = [(one, accuracy) for one in runs if (accuracy := one.last("accuracy")) is not None]
    dense: dict[Any, tuple[Run, float]] = {}
    for one, accuracy in known:
        if one.about.get("compression") == "none":
            dense.setdefault(one.task, (one, accuracy))
    return {
        one.name: 100 * (accuracy - dense[one.task][1])
        for one, accuracy in known
        if one.task in dense and one is not dense[one.task][0]
    }


def _ratio(run: Run, key: str, other: str) -> float | None:
    above, below = run.middle(key), run.middle(other)
    return above / below if above is not None and below else None


def _hidden(run: Run) -> float | None:
    hidden, exposed = run.total("total/seconds_hidden"), run.total("total/seconds_exposed")
    return hidden / (hidden + exposed) if hidden + exposed else None


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>horovod-sparse report</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }}
img {{ max-width: 100% }}
table {{ border-collapse: collapse }}
th, td {{ border-bottom: 1px solid #ddd; padding: 0.2em 0.8em; text-align: right }}
th {{ font-weight: normal; text-align: left }}
thead td {{ font-weight: bold }}
</style>
<h1>horovod-sparse report</h1>
<img alt="Loss and accuracy over bytes; loss, densities and norms over steps; parts of a step"
  src="data:image/png;base64,{image}">
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}</tbody>
</table>
<p>{notes}</p>
<h2>Settings</h2>
{settings}
</html>
"""
