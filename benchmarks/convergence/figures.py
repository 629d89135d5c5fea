"""The figures of the convergence benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter, PercentFormatter

from benchmarks.convergence.results import Interval, Results
from benchmarks.convergence.runs import BLOCKS, DENSE, REFRESHES, STDLIB, grid_name

# What a user chooses between, by family: the other runs are variants, which the tables have.
FAMILIES = {
    "dense": (DENSE, "fp16"),
    "PowerSGD": ("powersgd-4", "powersgd-2", "powersgd-1"),
    "top-k": ("topka-10", "topka", "topka-1000"),
    "Ok-Topk": ("oktopk-10%", "oktopk"),
    "gTop-k": ("gtopk",),
    "GraVAC": ("gravac-0.7",),
    "Stable Top-K": (grid_name(64, 5),),
}


def plot_overview(results: Results, task: str, path: Path) -> None:
    """Draws the metric over bytes sent in a step as PNG; bars are standard errors over the seeds."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, (family, names) in enumerate(FAMILIES.items()):
        runs = [run for run in names if results.finals(task, run) and not results.diverged(task, run)]
        if runs:
            _draw_family(axes, results, task, family, runs, "black" if family == "dense" else f"C{number}")
    metric = results.of(task, results.runs(task)[0])[0]["metric"]
    axes.set(xscale="log", xlabel="bytes sent by a rank in a step", ylabel=f"test {metric}", title=task)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if metric == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axes.invert_yaxis()  # up is better in every figure
    axes.margins(0.12, 0.1)
    axes.grid(which="both", alpha=0.25)
    figure.savefig(path, format="png", dpi=120)


def _draw_family(axes: Axes, results: Results, task: str, family: str, runs: Sequence[str], colour: str) -> None:
    """Draws a line through the runs of a family, each with its name."""
    places = [results.bytes_per_step(task, run) for run in runs]
    finals = [[*results.finals(task, run).values()] for run in runs]
    errors = [Interval.of(values).error if len(values) > 1 else 0.0 for values in finals]
    axes.errorbar(places, list(map(mean, finals)), errors, color=colour, marker="o", capsize=3, linewidth=1)
    for run, place, values in zip(runs, places, finals, strict=True):
        name = family if run.startswith("stable") else run
        axes.annotate(name, (place, mean(values)), (0, 7), textcoords="offset points", ha="center", color=colour)


def plot_grid(results: Results, path: Path) -> None:
    """Draws the perplexity of Stable Top-K over the steps between two choices, a line for each size of blocks."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, block in enumerate(BLOCKS):
        cells = [(refresh, results.finals(STDLIB, grid_name(block, refresh))) for refresh in REFRESHES]
        points = [(refresh, mean(finals.values())) for refresh, finals in cells if finals]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=f"C{number}")
            axes.annotate(
                f"blocks of {block}", points[-1], (6, 0), textcoords="offset points", va="center", color=f"C{number}"
            )
    for name in (DENSE, "oktopk-10%"):
        finals = results.finals(STDLIB, name)
        if finals:
            axes.axhline(mean(finals.values()), color="black", linewidth=1, linestyle="--")
            axes.annotate(name, (REFRESHES[0], mean(finals.values())), (0, 3), textcoords="offset points")
    axes.set(xscale="log", xlabel="steps between two choices of blocks", ylabel="test perplexity")
    axes.set_xticks(REFRESHES, [str(refresh) for refresh in REFRESHES])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.25)
    axes.grid(alpha=0.25)
    figure.savefig(path, format="png", dpi=120)
