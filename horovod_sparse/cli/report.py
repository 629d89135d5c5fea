"""`horovod-sparse report`: Compare the statistics of training runs in a table, a PNG and a self-contained HTML file.

A RUN is a folder with a statistics.jsonl written by hvs.metrics.Log. The figure shows loss and accuracy over the bytes
sent, densities and norms over the steps, and the stages of a step.
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
All numbers are from the rank that wrote them. Loss and accuracy: the last values. Others: median over the records.
* These stages run on a separate thread during backward, so they do not add up to the whole step. "agree" and
"exchange" include the wait for the slowest rank. "exchange hidden" is the share of the time of these stages before the
last gradient was submitted. "wait" is the rest of the exchange after backward has ended. A dense exchange by Horovod or
DDP appears only in "wait"; its bytes are computed as those of a ring, 2 (P-1)/P times the size of the gradients.
"shortest trial step, exposed" is the share of a step that the exchange takes after the last gradient, at the fastest of
the densities that were tried. Above 50%, exchange less often: docs/local-steps.md."""

# Rows of the table: label, format, and the function that returns the number.
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
    ("shortest trial step, exposed", ".0%", lambda run: run.last("total/trial_exposed_share")),
    ("samples/s", ",.0f", lambda run: run.middle("samples_per_second")),
)


def add_parser(subparsers: Any) -> None:
    """Add this subcommand."""
    about = str(__doc__).partition(": ")[2]
    parser = subparsers.add_parser("report", help="compare the statistics of training runs", description=about)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder with a statistics.jsonl")
    files = "folder for report.png, report.html and report.json (default: runs)"
    parser.add_argument("--output", type=Path, default=Path("runs"), help=files)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Print the table, write the files, and return 0."""
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
    print(f"\n{NOTES}\n\nReport: {options.output / 'report.html'} (figure: report.png, numbers: report.json)")
    return 0


def table(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: a label and one cell per run; "-" where a number was not written."""
    rows = [("", [run.name for run in runs])]
    rows += [
        (name, [str(run.about.get(name, "-")) for run in runs])
        for name in ("frontend", "compression")
        if any(name in run.about for run in runs)
    ]
    for label, layout, number in _ROWS:
        values = [number(run) for run in runs]
        rows.append((label, ["-" if value is None else format(value, layout) for value in values]))
    rows.append(("time per step in ms", ["" for _ in runs]))
    for name, _, overlapped in STAGES:
        times = [run.ms()[name] for run in runs]
        rows.append((f"  {name}{' *' if overlapped else ''}", ["-" if ms is None else f"{ms:.2f}" for ms in times]))
    return rows


def text(runs: Sequence[Run]) -> str:
    """Return the table as aligned text."""
    rows = table(runs)
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(runs))]
    first = max(len(label) for label, _ in rows)
    lines = []
    for label, cells in rows:
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([f"{label:<{first}}", *aligned]).rstrip())
    return "\n".join([lines[0], "-" * (first + sum(width + 2 for width in widths)), *lines[1:]])


def page(runs: Sequence[Run], image: bytes) -> str:
    """Return the report as self-contained HTML."""
    head, *rows = [
        f"<th>{html.escape(label.strip())}</th>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        for label, cells in table(runs)
    ]
    settings = "".join(
        f"<details><summary>{html.escape(run.name)}</summary><pre>{html.escape(json.dumps(run.about, indent=2))}</pre>"
        "</details>"
        for run in runs
    )
    return _PAGE.format(
        image=b64encode(image).decode(),
        head=head,
        rows="".join(f"<tr>{row}</tr>\n" for row in rows),
        notes=html.escape(NOTES).replace("\n* ", "<br>* "),
        settings=settings,
    )


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the numbers of the table: shares as fractions, bytes and milliseconds per step and rank."""
    numbers = {
        run.name: {
            "about": run.about,
            **{label: number(run) for label, _, number in _ROWS},
            "ms_per_step": run.ms(),
        }
        for run in runs
    }
    return {"runs": numbers, "accuracy_minus_dense_points": differences(runs)}


def differences(runs: Sequence[Run]) -> dict[str, float]:
    """Return the accuracy of each run minus that of the first dense run of its task, in percentage points.

    A task is a data set and a model. Runs without such a dense run, and the dense run itself, are left out.
    """
    known = [(run, accuracy) for run in runs if (accuracy := run.last("accuracy")) is not None]
    dense: dict[Any, tuple[Run, float]] = {}
    for run, accuracy in known:
        if run.about.get("compression") == "none":
            dense.setdefault(run.task, (run, accuracy))
    return {
        run.name: 100 * (accuracy - dense[run.task][1])
        for run, accuracy in known
        if run.task in dense and run is not dense[run.task][0]
    }


def _ratio(run: Run, numerator: str, denominator: str) -> float | None:
    above, below = run.middle(numerator), run.middle(denominator)
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
<img alt="Loss and accuracy over bytes; loss, densities and norms over steps; stages of a step"
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
