"""Figure of the report; matplotlib is imported only here and in ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from horovod_sparse.cli.image import write_png
from horovod_sparse.cli.runs import STAGES, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours of runs are saturated and those of stages pale, so that none is mistaken for the other.
_RUN_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#000000", "#9467bd", "#8c564b")
_STAGE_COLOURS = {
    "forward": "#80b1d3",
    "backward": "#8dd3c7",
    "select": "#fb9a8f",
    "agree": "#f5e79e",
    "exchange": "#fdb462",
    "apply": "#bebada",
    "wait": "#d9d9d9",
    "update": "#b3b3b3",
}


def draw(runs: Sequence[Run]) -> Figure:
    """Plot loss and accuracy over bytes, loss, density and norms over steps, and the stages of a step."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(14, 8), layout="constrained")
    (loss_of_bytes, accuracy, stages), (loss, density, norms) = figure.subplots(2, 3)
    for number, run in enumerate(runs):
        style: dict[str, Any] = {
            "color": _RUN_COLOURS[number % len(_RUN_COLOURS)],
            "linewidth": 1.8,
            "marker": "." if len(run.records) < 50 else "",
        }
        loss_of_bytes.plot(*run.over_bytes("loss"), label=run.label, **style)
        accuracy.plot(*run.over_bytes("accuracy"), **style)
        loss.plot(*run.curve("loss"), **style)
        loss.plot(*run.curve("test_loss"), linestyle=":", **style)
        density.plot(*run.curve("total/density"), **style)
        density.plot(*run.curve("total/density_asked"), linestyle=":", **style)
        norms.plot(*run.curve("total/residual_norm"), **style)
        norms.plot(*run.curve("total/gradient_norm"), linestyle=":", **style)
    loss_of_bytes.set(title="Loss over traffic", xlabel="bytes sent by a rank", ylabel="training loss")
    accuracy.set(title="Accuracy over traffic", xlabel="bytes sent by a rank", ylabel="test accuracy")
    loss.set(title="Loss (solid: training, dotted: test)", xlabel="step", ylabel="loss")
    density.set(title="Density (solid: sent, dotted: requested)", xlabel="step", ylabel="share of the gradient entries")
    norms.set(title="Norm (solid: residual, dotted: gradient)", xlabel="step", ylabel="L2 norm")
    for axes in (loss_of_bytes, accuracy):
        _logarithmic(axes, "x")
        axes.set_xlim(left=None if axes.get_xscale() == "log" else 0)
        axes.xaxis.set_major_formatter(EngFormatter("B"))
    for axes in (loss_of_bytes, loss, density, norms):
        _logarithmic(axes, "y")
    for axes in (loss_of_bytes, accuracy, loss, density, norms):
        axes.grid(alpha=0.3)
    if not any(len(line.get_xdata()) for line in accuracy.lines):
        accuracy.set_axis_off()
        accuracy.text(0.5, 0.5, "no accuracy was logged", ha="center", va="center", transform=accuracy.transAxes)
    _draw_stages(stages, runs)
    handles, labels = loss_of_bytes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(runs)), frameon=False)
    return figure


def png(figure: Figure) -> bytes:
    """Return a figure as PNG bytes."""
    image = BytesIO()
    write_png(figure, image, dpi=110)
    return image.getvalue()


def _logarithmic(axes: Any, which: str) -> None:
    """Make an axis logarithmic, unless a point is not positive."""
    values = [value for line in axes.lines for value in (line.get_xdata() if which == "x" else line.get_ydata())]
    if values and min(values) > 0:
        axes.set(**{f"{which}scale": "log"})


def _draw_stages(axes: Any, runs: Sequence[Run]) -> None:
    """Draw two stacked bars for each run, main thread and exchange thread, and a line at the step time."""
    times = [run.ms() for run in runs]
    below = {False: [0.0] * len(runs), True: [0.0] * len(runs)}
    for name, _, overlapped in STAGES:
        if name == "whole step":
            continue
        heights = [ms[name] or 0.0 for ms in times]
        centres = [number + (0.2 if overlapped else -0.2) for number in range(len(runs))]
        axes.bar(centres, heights, 0.36, bottom=below[overlapped], color=_STAGE_COLOURS[name], label=name)
        below[overlapped] = [low + height for low, height in zip(below[overlapped], heights, strict=True)]
    for number, ms in enumerate(times):
        if ms["whole step"] is not None:
            axes.hlines(ms["whole step"], number - 0.42, number + 0.42, "black")
    axes.set_xticks(range(len(runs)), [run.name for run in runs])
    axes.set(
        title="Time of a step (line: total)", xlabel="left: main thread, right: exchange thread", ylabel="milliseconds"
    )
    axes.set_ylim(0, 1.35 * (axes.get_ylim()[1] or 1.0))  # leaves space for the legend above the bars
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(ncols=4, fontsize="x-small", frameon=False, loc="upper center")
