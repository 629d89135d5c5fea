"""Figures of the convergence benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, NullFormatter, PercentFormatter

from benchmarks.convergence.results import Interval, Results
from benchmarks.convergence.runs import (
    BLOCKS,
    DENSE,
    PERCENTS,
    POWERSGD_RANKS,
    REFRESHES,
    STDLIB,
    grid_name,
    heavy_name,
    recommended_name,
)

_BELOW, _ABOVE, _BESIDE = ((0, -7), "center", "top"), ((0, 7), "center", "bottom"), ((7, -1), "left", "top")
# Positions of a family's labels, chosen to avoid overlaps: offset in points, and alignment of the text.
_SIDES = {
    "dense": ((4, 5), "left", "bottom"),
    "dense-nesterov": ((-4, 4), "right", "bottom"),
    "recommended": ((-4, 4), "right", "bottom"),
    "heavy ball": ((-4, 4), "right", "bottom"),
    "PowerSGD": ((7, 0), "left", "center"),
    "top-k": ((-3, 4), "right", "bottom"),
    "Ok-Topk": ((-7, 0), "right", "center"),
    "gTop-k": _BELOW,
    "GraVAC": _BELOW,
    "Stable Top-K": _BELOW,
}
_CEILING = 60  # perplexity
# Labels of runs that are shorter than their names.
_NAMES = {
    grid_name(64, 5): "Stable Top-K",
    **{name(percent): f"{percent:g} %" for percent in PERCENTS for name in (recommended_name, heavy_name)},
    **{f"powersgd-{rank}": f"rank {rank}" for rank in POWERSGD_RANKS},
}
# Families with numbers as labels: the label of the last run also names the family.
_NUMBERED = ("recommended", "heavy ball", "PowerSGD")
# Positions of labels that differ from their family's.
_PLACES = {
    heavy_name(PERCENTS[-1]): _BELOW,
    heavy_name(2): _ABOVE,
    "powersgd-4": ((4, -6), "center", "top"),
    "topka-1000": _BELOW,
    "oktopk-10%": _BESIDE,
}
# The runs that a user would choose from, by family. All others are variants, which only the tables show.
FAMILIES = {
    "dense": (DENSE, "fp16"),
    "dense-nesterov": ("dense-nesterov",),
    "recommended": tuple(map(recommended_name, PERCENTS)),
    "heavy ball": tuple(map(heavy_name, PERCENTS)),
    "PowerSGD": tuple(f"powersgd-{rank}" for rank in reversed(POWERSGD_RANKS)),
    "top-k": ("topka-10", "topka", "topka-1000"),
    "Ok-Topk": ("oktopk-10%", "oktopk"),
    "gTop-k": ("gtopk",),
    "GraVAC": ("gravac-0.7",),
    "Stable Top-K": (grid_name(64, 5),),
}


def plot_overview(results: Results, task: str, path: Path) -> None:
    """Draw the metric over the bytes sent per step in a PNG; bars are standard errors over the seeds."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, (family, names) in enumerate(FAMILIES.items()):
        runs = [run for run in names if results.finals(task, run) and not results.diverged(task, run)]
        if runs:
            _draw_family(axes, results, task, family, runs, "black" if family.startswith("dense") else f"C{number}")
    metric = results.of(task, results.runs(task)[0])[0]["metric"]
    axes.set(xscale="log", xlabel="bytes sent by a rank in a step", ylabel=f"test {metric}", title=task)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if metric == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axes.invert_yaxis()  # up is better in every figure
    axes.margins(0.25, 0.1)
    axes.grid(which="both", alpha=0.25)
    figure.savefig(path, format="png", dpi=120)


def _draw_family(axes: Axes, results: Results, task: str, family: str, runs: Sequence[str], colour: str) -> None:
    """Draw a line through the runs of a family, and label each run."""
    places = [results.bytes_per_step(task, run) for run in runs]
    finals = [[*results.finals(task, run).values()] for run in runs]
    errors = [Interval.of(values).error if len(values) > 1 else 0.0 for values in finals]
    axes.errorbar(places, list(map(mean, finals)), errors, color=colour, marker="o", capsize=3, linewidth=1)
    for run, place, values in zip(runs, places, finals, strict=True):
        name = _NAMES.get(run, run)
        where = _PLACES.get(run, _SIDES[family])
        if family in _NUMBERED and run == runs[-1]:
            name = f"{family}, {name}"
            where = _BELOW if len(runs) == 1 else where  # a long label needs space at the edge of the figure
        offset, across, along = where
        label = axes.annotate(
            name, (place, mean(values)), offset, textcoords="offset points", ha=across, va=along, color=colour
        )
        label.set_path_effects([withStroke(linewidth=3, foreground="white")])  # legible on top of other lines


def plot_grid(results: Results, path: Path) -> None:
    """Draw the perplexity of Stable Top-K over the steps between two choices in a PNG, with one line per block size.

    Runs that diverged, or ended above ``_CEILING``, are crosses at the upper edge.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, block in enumerate(BLOCKS):
        names = {refresh: grid_name(block, refresh) for refresh in REFRESHES}
        finals = {refresh: _final(results, name) for refresh, name in names.items() if results.of(STDLIB, name)}
        near = {refresh: final for refresh, final in finals.items() if final < _CEILING}
        axes.plot([*near], [*near.values()], marker="o", color=f"C{number}", label=f"blocks of {block}")
        # Shifted sideways so that crosses do not overlap.
        beyond = [refresh * 1.08 ** (number - 1.5) for refresh in finals.keys() - near.keys()]
        axes.plot(beyond, [_CEILING] * len(beyond), marker="x", linestyle="", color=f"C{number}", markersize=8)
    for name, style in ((DENSE, "-"), ("oktopk-10%", "--")):
        if results.of(STDLIB, name):
            axes.axhline(_final(results, name), color="black", linewidth=1, linestyle=style, label=name)
    axes.plot([], [], marker="x", linestyle="", color="grey", label=f"diverged, or above {_CEILING}")
    axes.set_ylim(20, 1.06 * _CEILING)
    axes.set(xscale="log", yscale="log", xlabel="steps between two choices of blocks", ylabel="test perplexity")
    axes.set_xlim(REFRESHES[0] / 1.5, REFRESHES[-1] * 1.5)
    axes.set_xticks(REFRESHES, [str(refresh) for refresh in REFRESHES])
    axes.set_yticks(range(20, _CEILING + 1, 10), [str(tick) for tick in range(20, _CEILING + 1, 10)])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper")
    figure.savefig(path, format="png", dpi=120)


def _final(results: Results, run: str) -> float:
    """Return the mean perplexity of a run; infinity if a seed diverged."""
    return math.inf if results.diverged(STDLIB, run) else mean(results.finals(STDLIB, run).values())
