"""Figures of the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from results import PARTS, Run

STEP = "whole step"


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


def plot_breakdown(runs: Sequence[Run], path: Path) -> None:
    """Draws what a step of each run consists of, one stacked bar a run, and the samples per second."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (times, speed) = plt.subplots(1, 2, figsize=(max(8.0, 1.6 * len(runs)), 4.8), layout="constrained")
    places = range(len(runs))
    below = [0.0] * len(runs)
    for part, colour in zip(PARTS, ("#4c78a8", "#72b7b2", "#e45756", "#f2a03d", "#b8b8b8"), strict=True):
        heights = [run.parts()[part] for run in runs]
        times.bar(places, heights, 0.6, bottom=below, color=colour, label=part)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    steps = [run.ms("step") or 0.0 for run in runs]
    times.hlines(steps, [x - 0.4 for x in places], [x + 0.4 for x in places], "black", label=STEP)
    times.set(title="Time of a step", ylabel="ms", ylim=(0, 1.05 * max(*below, *steps)))
    speeds = [median(run.curve("samples_per_second")) for run in runs]
    speed.bar_label(speed.bar(places, speeds, 0.6, color="#79706e"), fmt="{:,.0f}", padding=2)
    speed.set(title="Speed of all ranks together", ylabel="samples/s", ylim=(0, 1.12 * max(speeds)))
    for axes in (times, speed):
        axes.set_xticks(places, [run.name for run in runs], rotation=30, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.6, len(runs) - 0.4)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
