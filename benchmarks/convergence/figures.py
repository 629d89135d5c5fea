"""The figures of the convergence benchmark."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter, ScalarFormatter

from benchmarks.convergence.results import Results
from benchmarks.convergence.runs import DENSE

MARKERS = "osD^vP*X<>hpd"
_COLUMNS = 3

Style = dict[str, Any]


def plot(results: Results, task: str, path: Path) -> None:
    """Draws a task as PNG: the metric over bytes sent for all runs, and learning curves for each group of them.

    Above, a group has a colour and a run in it a marker; below, where each group stands alone, a run has a colour, too.
    """
    styles = _styles(results, task)
    groups = [name for name, runs in results.groups(task).items() if runs != [DENSE]]
    rows = -(-max(1, len(groups)) // _COLUMNS)
    figure = Figure(figsize=(13, 5 + 3 * rows), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[5, 3 * rows])[:, 0]
    overview = above.subplots()
    _draw_overview(overview, results, task, styles)
    handles = overview.get_legend_handles_labels()
    above.legend(*handles, loc="outside right upper", ncols=1 + (len(handles[0]) > 16), fontsize="small", frameon=False)
    for axes, name in zip(below.subplots(rows, _COLUMNS, squeeze=False).flat, groups, strict=False):
        _draw_curves(axes, results, task, name, styles)
    for axes in below.axes[len(groups) :]:
        axes.remove()
    figure.savefig(path, format="png", dpi=120)


def _styles(results: Results, task: str) -> dict[str, Style]:
    """Colour and marker of each run; dense training is black."""
    styles: dict[str, Style] = {}
    for number, runs in enumerate(results.groups(task).values()):
        for place, run in enumerate(runs):
            colour = "black" if run == DENSE else f"C{number}"
            styles[run] = {"color": colour, "marker": MARKERS[place % len(MARKERS)]}
    return styles


def _draw_overview(axes: Axes, results: Results, task: str, styles: dict[str, Style]) -> None:
    """Draws the mean of the seeds after the last step, and as a bar from the worst to the best seed."""
    for run, style in styles.items():
        finals = results.finals(task, run)
        if results.diverged(task, run):
            axes.plot([], [], linestyle="", label=f"{run} (diverged)", **style)
            continue
        middle = mean(finals)
        nbytes = mean(record["bytes_sent"] for record in results.of(task, run))
        ends = [[middle - min(finals)], [max(finals) - middle]]
        axes.errorbar([nbytes], [middle], ends, linestyle="", markersize=8, capsize=3, label=run, **style)
    axes.set(xscale="log", xlabel="bytes sent by a rank", title=f"{task}: after training")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _format(axes, results, task)


def _draw_curves(axes: Axes, results: Results, task: str, group: str, styles: dict[str, Style]) -> None:
    """Draws the learning curves of a group, mean of the seeds, beside dense training."""
    for number, run in enumerate((DENSE, *(run for run in results.groups(task)[group] if run != DENSE))):
        style = {**styles[run], "color": "black" if run == DENSE else f"C{number - 1}"}
        curves = [record["curve"] for record in results.of(task, run)]
        # A seed that diverged ends early, and with it the mean.
        points = [(seeds[0]["step"], mean(point["value"] for point in seeds)) for seeds in zip(*curves, strict=False)]
        if points:
            axes.plot(*zip(*points, strict=True), linewidth=1, markersize=4, label=run, **style)
    axes.set(title=group, xlabel="step")
    _format(axes, results, task)
    axes.legend(fontsize="x-small", framealpha=0.6)


def _format(axes: Axes, results: Results, task: str) -> None:
    """Limits the metric's axis to where the runs end, which is of interest, rather than where they start."""
    metric = results.of(task, results.runs(task)[0])[0]["metric"]
    finals = [final for run in results.runs(task) for final in results.finals(task, run)] or [1.0]
    if metric == "accuracy":
        axes.set_ylim(max(0.0, min(finals) - 0.05), 1.005)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axes.set(yscale="log", ylim=(0.9 * min(finals), 1.5 * max(finals)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"test {metric}")
    axes.grid(which="both", alpha=0.25)
