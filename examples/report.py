"""Compares runs of train.py: one table, the learning curves and the numbers.

    python examples/report.py runs/dense runs/topka --output runs

Writes ``curves.png`` and ``summary.json``, and ``densities.png`` where a density changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

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
DENSE = ("none", "fp16")  # compressions of Horovod and of DistributedDataParallel themselves
NOTES = """\
Loss and accuracy: last epoch, whole test part. Speed and times: median over epochs of the mean over ranks.
* These run on a thread of their own beside backward: the stages overlap and do not add up to the whole step.
"agree" is a tiny message that waits for the slowest rank; "wait" is what is left to do once backward has ended, with
Horovod. DistributedDataParallel (door ddp) waits within backward. A dense exchange shows nowhere else, and its bytes
are computed, not counted: 2 (P-1)/P times the gradients' size, which a ring sends."""


@dataclass(frozen=True)
class Run:
    """One run of train.py.

    Attributes:
        name: Name of its folder.
        content: What its result.json holds; ``record.py`` wrote it.
    """

    name: str
    content: dict[str, Any]

    @property
    def compression(self) -> str:
        """The run's --compression."""
        return str(self.content["configuration"]["compression"])

    @property
    def door(self) -> str:
        """The run's --door."""
        return str(self.content["configuration"].get("door", "horovod"))

    @property
    def task(self) -> tuple[str, str]:
        """The run's --data and --model; accuracies of other ones are not comparable."""
        return self.content["configuration"]["data"], self.content["configuration"]["model"]

    @property
    def dense(self) -> bool:
        """Tells whether the gradients travelled whole and unrounded."""
        return self.compression == "none"

    @property
    def densities(self) -> dict[str, list[float]]:
        """The density of every step, by bucket; empty where the exchange was dense."""
        return dict(self.content["densities"])

    @property
    def last(self) -> dict[str, Any]:
        """The record of the last epoch."""
        epochs: list[dict[str, Any]] = self.content["epochs"]
        return epochs[-1]

    def curve(self, key: str) -> list[float]:
        """One value per epoch."""
        return [epoch[key] for epoch in self.content["epochs"]]

    def ms(self, stage: str) -> float | None:
        """Milliseconds per step of a stage; None for the stages that the run does not show."""
        if self.compression in DENSE and stage in ("select", "agree", "exchange", "apply"):
            return None
        if self.door == "ddp" and stage == "synchronize":
            return None
        return float(median(epoch["ms_per_step"][stage] for epoch in self.content["epochs"]))


def read(folder: Path) -> Run:
    """Reads a run.

    Raises:
        ValueError: The folder has no result.json, or one that train.py did not write.
    """
    path = folder / "result.json"
    try:
        content = json.loads(path.read_text())
        run = Run(folder.resolve().name, content)
        run.compression, run.task, run.last  # noqa: B018 - what is missing must show here
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{path} holds no results ({type(error).__name__}: {error}): run examples/train.py --output {folder} first"
        ) from error
    return run


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
            "ms_per_step": {stage: run.ms(stage) for stage, _ in STAGES},
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


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draws the learning curves of all runs together: accuracy and loss over epochs, accuracy over bytes sent."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter, PercentFormatter

    figure, (accuracy, loss, cost) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for number, run in enumerate(runs):
        style: dict[str, Any] = {"color": f"C{number}", "label": f"{run.name} ({run.compression})", "linewidth": 1.8}
        accuracy.plot(run.curve("epoch"), run.curve("test_accuracy"), **style)
        loss.plot(run.curve("epoch"), run.curve("test_loss"), **style)
        loss.plot(run.curve("epoch"), run.curve("train_loss"), **{**style, "linestyle": ":", "label": None})
        cost.plot(run.curve("bytes_sent"), run.curve("test_accuracy"), **style)
    accuracy.set(title="Test accuracy", xlabel="epoch")
    loss.set(title="Loss (solid: test, dotted: training)", xlabel="epoch", yscale="log")
    cost.set(title="Test accuracy over traffic", xlabel="bytes sent per rank", xscale="log")
    cost.xaxis.set_major_formatter(EngFormatter("B"))
    worst = min(run.last["test_accuracy"] for run in runs)
    bottom = min(0.9, max(0.0, 1 - 8 * (1 - worst)))  # where the runs end, not where they start, is of interest
    for axes in (accuracy, cost):
        axes.set_ylim(bottom, 1.005)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (accuracy, loss, cost):
        axes.grid(alpha=0.3)
    figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_densities(runs: Sequence[Run], path: Path) -> bool:
    """Draws what a schedule decided, one line a bucket; writes nothing where no run's density changed.

    Returns:
        Whether there was something to draw.
    """
    changing = [run for run in runs if any(len(set(one)) > 1 for one in run.densities.values())]
    if not changing:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    styles = ("-", "--", ":", "-.")
    for number, run in enumerate(changing):
        for bucket, densities in run.densities.items():
            label = f"{run.name} ({run.compression}), bucket {bucket}"
            factors = [1 / density for density in densities]
            style = styles[int(bucket) % len(styles)]
            axes.step(range(1, len(factors) + 1), factors, style, color=f"C{number}", label=label, where="mid")
    axes.set(title="Compression factor in force", xlabel="step", ylabel="1 / density", yscale="log")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


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
    densities = args.output / "densities.png"
    decided = f", densities: {densities}" if plot_densities(runs, densities) else ""
    (args.output / "summary.json").write_text(json.dumps(summary(runs), indent=2) + "\n")
    print(table(runs))
    for name, points in differences(runs).items():
        print(f"{name}: test accuracy {points:+.2f} points against dense")
    print(f"\n{NOTES}\n\nCurves: {args.output / 'curves.png'}, numbers: {args.output / 'summary.json'}{decided}")


if __name__ == "__main__":
    main()
