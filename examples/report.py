"""Compares runs of train.py: one table, the learning curves and the numbers.

    python examples/report.py runs/dense runs/topka --output runs

Writes ``curves.png``, ``summary.json``, what a step consists of (``breakdown.png``, ``breakdown.md``), and
``densities.png`` where a density changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from figures import STEP, plot, plot_breakdown, plot_densities
from results import PARTS, Run, read

# Row of the table: key of ms_per_step, label. The four in the middle run on a thread of their own.
STAGES = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("select", "accumulate+select *"),
    ("agree", "agree *"),
    ("exchange", "exchange *"),
    ("apply", "apply *"),
    ("synchronize", "wait"),
    ("update", "update"),
    ("step", "whole step"),
)
NOTES = """\
Loss and accuracy: last epoch, whole test part. Speed and times: median over epochs of the mean over ranks.
* These run on a thread of their own beside backward: the stages overlap and do not add up to the whole step. With
--no-overlap they come after backward, within "wait".
"agree" is a tiny message that waits for the slowest rank; "wait" is what is left to do once backward has ended, with
Horovod. DistributedDataParallel (door ddp) waits within backward. A dense exchange shows nowhere else, and its bytes
are computed, not counted: 2 (P-1)/P times the gradients' size, which a ring sends."""
PARTS_NOTES = """\
Milliseconds per step, medians over epochs of the mean over ranks; on a GPU the device's time. Compression is select and
apply; communication is agree and exchange, and of a dense exchange the wait for it. What is missing to the whole step
is loading images and the like. With an exchange beside backward the parts may be more than the step: that much is
hidden. DistributedDataParallel waits for the exchange within backward."""


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The table's numbers: accuracies as fractions, bytes and ms per step and rank."""
    numbers: dict[str, Any] = {
        run.name: {
            "door": run.door,
            "compression": run.compression,
            "test_accuracy": run.last["test_accuracy"],
            "test_loss": run.last["test_loss"],
            "bytes_per_step": median(run.curve("bytes_per_step")),
            "samples_per_second": median(run.curve("samples_per_second")),
            "overlap": run.overlap,
            "ms_per_step": {stage: run.ms(stage) for stage, _ in STAGES},
            "parts_in_ms": run.parts(),
        }
        for run in runs
    }
    return {"runs": numbers, "accuracy_minus_dense_points": differences(runs)}


def differences(runs: Sequence[Run]) -> dict[str, float]:
    """Accuracy minus that of the first dense run of the same data and model, in percentage points.

    Runs without such a dense run, and the dense run itself, are left out.
    """
    dense: dict[tuple[str, str], Run] = {}
    for run in runs:
        if run.dense:
            dense.setdefault(run.task, run)
    return {
        run.name: 100 * (run.last["test_accuracy"] - dense[run.task].last["test_accuracy"])
        for run in runs
        if run.task in dense and run is not dense[run.task]
    }


def table(runs: Sequence[Run]) -> str:
    """The comparison as text, one column a run."""
    numbers = summary(runs)["runs"].values()
    rows = [
        ("", [run.name for run in runs]),
        ("door", [run.door for run in runs]),
        ("compression", [run.compression for run in runs]),
        ("test accuracy", [f"{one['test_accuracy']:.2%}" for one in numbers]),
        ("test loss", [f"{one['test_loss']:.4f}" for one in numbers]),
        ("bytes sent per step and rank", [f"{one['bytes_per_step']:,.0f}" for one in numbers]),
        ("samples/s", [f"{one['samples_per_second']:,.0f}" for one in numbers]),
        ("time per step in ms", ["" for _ in runs]),
    ]
    for stage, label in STAGES:
        times = [run.ms(stage) for run in runs]
        rows.append((f"  {label}", ["-" if ms is None else f"{ms:.2f}" for ms in times]))
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(runs))]
    first = max(len(label) for label, _ in rows)
    lines = []
    for label, cells in rows:
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([f"{label:<{first}}", *aligned]).rstrip())
    return "\n".join([lines[0], "-" * (first + sum(width + 2 for width in widths)), *lines[1:]])


def breakdown(runs: Sequence[Run]) -> str:
    """What a step of each run consists of and its speed, as a table in Markdown."""
    header = ["run", "--compression", *PARTS, STEP, "exchange", "samples/s"]
    rows = [
        [
            run.name,
            f"`{run.compression}`",
            *(f"{ms:.2f}" for ms in run.parts().values()),
            f"{run.ms('step'):.2f}",
            "beside backward" if run.overlap else "after backward",
            f"{median(run.curve('samples_per_second')):,.0f}",
        ]
        for run in runs
    ]
    rule = ["---", "---", *["---:"] * (len(PARTS) + 1), "---", "---:"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)) + f"\n\n{PARTS_NOTES}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compares runs of train.py.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that train.py --output wrote")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder for curves.png and summary.json")
    args = parser.parse_args(arguments)
    try:
        runs = [read(folder) for folder in args.runs]
    except ValueError as error:
        sys.exit(f"report.py: {error}")
    args.output.mkdir(parents=True, exist_ok=True)
    plot(runs, args.output / "curves.png")
    plot_breakdown(runs, args.output / "breakdown.png")
    (args.output / "breakdown.md").write_text(breakdown(runs))
    densities = args.output / "densities.png"
    decided = f", densities: {densities}" if plot_densities(runs, densities) else ""
    (args.output / "summary.json").write_text(json.dumps(summary(runs), indent=2) + "\n")
    print(table(runs))
    for name, points in differences(runs).items():
        print(f"{name}: test accuracy {points:+.2f} points against dense")
    print(
        f"\n{NOTES}\n\nCurves: {args.output / 'curves.png'}, parts of a step: {args.output / 'breakdown.png'} and .md"
    )
    print(f"Numbers: {args.output / 'summary.json'}{decided}")


if __name__ == "__main__":
    main()
