"""Figures of the convergence benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, NullFormatter, PercentFormatter

from benchmarks.convergence.results import Interval, Results
from benchmarks.convergence.runs import (
    BLOCKS,
    DENSE,
    POWERSGD_RANKS,
    REFRESHES,
    STDLIB,
    TEN_MILLION,
    grid_name,
    recommended_name,
)
from horovod_sparse.cli.image import write_png

_CEILING = 60  # perplexity


@dataclass(frozen=True)
class _Family:
    """Runs of one method at several densities or ranks, which a line joins.

    Attributes:
        colour: Colour of line, points and labels.
        runs: Label of each run, as users type it.
        offset: Of a label from its point, in points.
        align: Horizontal alignment of the labels.
        places: Offsets and alignments of single runs, for all tasks or, with the task in front, for one.
        width: Of the line.
    """

    colour: str
    runs: Mapping[str, str]
    offset: tuple[float, float]
    align: str
    places: Mapping[str, tuple[tuple[float, float], str]] = field(default_factory=dict)
    width: float = 1.0


# What a user would choose from. All other runs are variants, which only the tables show.
_FAMILIES = (
    _Family("black", {DENSE: "dense", "fp16": "fp16"}, (8, -10), "left", {"fp16": ((-8, 4), "right")}),
    _Family("black", {"dense-nesterov": "dense, Nesterov momentum"}, (-8, 7), "right"),
    _Family(
        "C0",
        {"topka-10": "topka 10 %", "topka": "topka 1 %", "topka-1000": "topka 0.1 %"},
        (8, -12),
        "left",
        {"stdlib/topka": ((-6, 6), "right")},
    ),
    _Family("C2", {"oktopk": "oktopk 1 %"}, (-8, -4), "right", {"stdlib/oktopk": ((0, -22), "center")}),
    _Family(
        "C4",
        {f"powersgd-{rank}": f"rank {rank}" for rank in reversed(POWERSGD_RANKS[1:])}
        | {"powersgd-1": "PowerSGD rank 1"},
        (9, -4),
        "left",
        {"stdlib/powersgd-4": ((9, -12), "left"), "fashion-mnist/powersgd-4": ((-9, -8), "right")},
    ),
    _Family(
        "C6",
        {"powersgd-8-nesterov": "rank 8, Nesterov", "powersgd-4-nesterov": "rank 4, Nesterov"},
        (-9, -1),
        "right",
        {
            "fashion-mnist/powersgd-4-nesterov": ((-4, 28), "center"),
            "fashion-mnist/powersgd-8-nesterov": ((9, -2), "left"),
        },
    ),
    _Family(
        "C3",
        {"recommended": "recommended 1 %"}
        | {recommended_name(percent): f"{percent:g} %" for percent in (0.5, 0.3, 0.2, 0.1)},
        (0, -22),
        "center",
        {
            "recommended": ((-8, 10), "right"),
            "fashion-mnist/recommended-0.3%": ((-4, 10), "right"),
            "stdlib/recommended-0.2%": ((10, -8), "left"),
        },
        width=2.5,
    ),
)
# Label, colour, marker and whether it is filled.
_LOCAL_RUNS = {
    "dense-adam-tuned": ("dense", "black", "o", True),
    "recommended-adam-tuned": ("recommended 1 %", "C3", "o", True),
    "recommended-0.1%-adam": ("recommended 0.1 %", "C3", "v", True),
    "diloco-8": ("DiLoCo, H = 8", "C0", "D", True),
    "diloco-8-streamed": ("streamed", "C0", "D", False),
    "diloco-32": ("DiLoCo, H = 32", "C0", "s", True),
    "diloco-32-streamed": ("streamed", "C0", "s", False),
    "local-8-adam": ("ours, H = 8", "C2", "D", True),
    "local-32-adam": ("ours, H = 32", "C2", "s", True),
    "local-32-adam-streamed": ("streamed", "C2", "s", False),
    "local-32-adam-2bit": ("2 bits", "C2", "<", True),
    "sparseloco-32": ("SparseLoCo, H = 32", "C4", "s", True),
    "sparseloco-32-streamed": ("streamed", "C4", "s", False),
    "dense-muon-short": ("dense, Muon", "grey", "o", True),
    "muloco-32-short": ("MuLoCo, H = 32", "C1", "s", True),
    "muloco-32-short-streamed": ("streamed", "C1", "s", False),
    "muloco-32-short-2bit": ("2 bits", "C1", "<", True),
    "local-32-muon": ("ours, Muon, H = 32", "C9", "s", True),
    "local-32-muon-streamed": ("streamed", "C9", "s", False),
}
_LOCAL_TITLES = {
    STDLIB: "1.1 million parameters, 1000 steps",
    TEN_MILLION: "9.9 million parameters, 500 steps",
}
# Titles of tasks that have another name in the text.
_TITLES = {"fashion-mnist": "Images: Fashion-MNIST", "stdlib": "Language model: sources of Python's standard library"}


def plot_overview(results: Results, task: str, path: Path) -> None:
    """Draw the metric over the bytes sent per step in a PNG; bars are standard errors over the seeds."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for family in _FAMILIES:
        if runs := [run for run in family.runs if _ended(results, task, run)]:
            _draw_family(axes, results, task, family, runs)
    _label(axes, results.of(task, results.runs(task)[0])[0]["metric"], _TITLES.get(task, task))
    axes.margins(0.2, 0.12)
    write_png(figure, path)


def plot_local_steps(results: Mapping[str, Results], path: Path) -> None:
    """Draw the same for local steps and what exchanges in every step, with a panel for each task."""
    figure = Figure(figsize=(5 * len(results) + 2, 5), layout="constrained")
    panels = figure.subplots(ncols=len(results), squeeze=False)[0]
    for axes, (task, of_task) in zip(panels, results.items(), strict=True):
        for run, (label, colour, marker, filled) in _LOCAL_RUNS.items():
            if _ended(of_task, task, run):
                middle, error = _final_with_error(of_task, task, run)
                style: dict[str, Any] = {"color": colour, "marker": marker, "mfc": colour if filled else "white"}
                style |= {"linestyle": "", "capsize": 3, "elinewidth": 1, "label": label}
                axes.errorbar(of_task.bytes_per_step(task, run), middle, error, **style)
        _label(axes, "perplexity", _LOCAL_TITLES[task])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    write_png(figure, path)


def _ended(results: Results, task: str, run: str) -> bool:
    """Return whether there are results of a run, and no seed diverged."""
    return bool(results.finals(task, run)) and not results.diverged(task, run)


def _final_with_error(results: Results, task: str, run: str) -> tuple[float, float]:
    """Return mean and standard error over the seeds; an error of 0 for one seed."""
    interval = Interval.of([*results.finals(task, run).values()])
    return interval.middle, interval.error if interval.seeds > 1 else 0.0


def _label(axes: Axes, metric: str, title: str) -> None:
    axes.set(xscale="log", xlabel="bytes that a rank sends in a step", title=title)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if metric == "accuracy":
        axes.set_ylabel("test accuracy")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1, symbol=" %"))
    else:
        axes.set_ylabel(f"test {metric} (inverted: up is better)")
        axes.invert_yaxis()
    axes.grid(alpha=0.25)


def _draw_family(axes: Axes, results: Results, task: str, family: _Family, runs: Sequence[str]) -> None:
    """Draw a line through the runs of a family, and label each run."""
    places = [results.bytes_per_step(task, run) for run in runs]
    middles, errors = zip(*(_final_with_error(results, task, run) for run in runs), strict=True)
    style: dict[str, Any] = {"color": family.colour, "linewidth": family.width, "marker": "o", "capsize": 3}
    axes.errorbar(places, middles, errors, elinewidth=1, **style)
    for run, place, middle in zip(runs, places, middles, strict=True):
        usual = family.places.get(run, (family.offset, family.align))
        offset, align = family.places.get(f"{task}/{run}", usual)
        label = axes.annotate(
            family.runs[run], (place, middle), offset, textcoords="offset points", ha=align, color=family.colour
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
        axes.plot([*near], [*near.values()], marker="o", color=f"C{number}", label=f"stable, block={block}")
        # Shifted sideways so that crosses do not overlap.
        beyond = [refresh * 1.08 ** (number - 1.5) for refresh in finals.keys() - near.keys()]
        axes.plot(beyond, [_CEILING] * len(beyond), marker="x", linestyle="", color=f"C{number}", markersize=8)
    for name, label, style in ((DENSE, "dense", "-"), ("oktopk-10%", "oktopk 10 %", "--")):
        if results.of(STDLIB, name):
            axes.axhline(_final(results, name), color="black", linewidth=1, linestyle=style, label=label)
    axes.plot([], [], marker="x", linestyle="", color="grey", label=f"diverged, or above {_CEILING}")
    axes.set_ylim(20, 1.06 * _CEILING)
    axes.set(
        xscale="log", yscale="log", xlabel="refresh: steps between two choices of blocks", ylabel="test perplexity"
    )
    axes.set_title("stable at 10 %, language model")
    axes.set_xlim(REFRESHES[0] / 1.5, REFRESHES[-1] * 1.5)
    axes.set_xticks(REFRESHES, [str(refresh) for refresh in REFRESHES])
    axes.set_yticks(range(20, _CEILING + 1, 10), [str(tick) for tick in range(20, _CEILING + 1, 10)])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper")
    write_png(figure, path)


def _final(results: Results, run: str) -> float:
    """Return the mean perplexity of a run; infinity if a seed diverged."""
    return math.inf if results.diverged(STDLIB, run) else mean(results.finals(STDLIB, run).values())
