"""Figure of the parts of a step, as Fig. 4 of Yoon and Oh (2022), from results of several numbers of ranks.

    python -m benchmarks.training_step.figure runs/1.jsonl runs/2.jsonl runs/4.jsonl --output runs/step

The results are those that ``python -m benchmarks.training_step --output`` wrote without --overlap. Writes OUTPUT.png
and OUTPUT.svg: one panel per number of ranks, and one with the published figures.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import command_line
from benchmarks.runner import Records
from horovod_sparse.cli.image import write_png

LABELS = {"sorted": "Top-k, torch.topk", "randomk": "Random-k", "ours": "Top-k, ours"}
COLOURS = {
    "forward": "#80b1d3",
    "backward": "#8dd3c7",
    "compression": "#d62728",
    "communication": "#fdb462",
    "update": "#b3b3b3",
    "rest": "#e4e4e4",
}
_OTHER = "computing and compression"
_ROOM = 1.2  # of the highest bar and the number above it
# 8 ranks with one A100 each, VGG-16 on CIFAR-10, 128 images per rank: samples/s, ms of communication per step.
PUBLISHED = {"dense": (17387, 1.24), "Random-k": (15648, 1.00), "Top-k by sorting": (3724, 16.86)}
_PUBLISHED_SAMPLES = 8 * 128

Bars = Mapping[str, Mapping[str, float]]  # milliseconds by contender and part


def load(path: Path) -> dict[str, Any]:
    """Return the results in a file.

    Raises:
        ValueError: The exchange overlapped the backward pass, so that the parts do not add up.
    """
    lines = Records(path).lines
    result = {**lines[0], "contenders": {line["contender"]: line for line in lines}}
    if result["overlap"]:
        raise ValueError(f"{path} was measured with --overlap: its parts do not add up to the step")
    return result


def measured(result: Mapping[str, Any]) -> Bars:
    """Return the bars of one number of ranks. The rest closes the gap to the median step."""
    bars = {}
    for name, contender in result["contenders"].items():
        parts = {part: contender["ms"][part][0] for part in COLOURS if part != "rest"}
        parts["rest"] = max(0.0, contender["ms"]["step"][0] - sum(parts.values()))
        bars[LABELS.get(name, name)] = parts
    return bars


def published() -> Bars:
    """Return the bars of Yoon and Oh, of which only samples/s and communication are known as numbers."""
    bars = {}
    for name, (rate, communication) in PUBLISHED.items():
        step = 1e3 * _PUBLISHED_SAMPLES / rate
        bars[name] = {_OTHER: step - communication, "communication": communication}
    return bars


def draw(results: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw one panel of stacked bars per result, on a common scale, and one of the published figures."""
    results = sorted(results, key=lambda result: int(result["ranks"]))
    figure = Figure(figsize=(max(9, 2.9 * (len(results) + 1)), 5), layout="constrained")
    panels = figure.subplots(1, len(results) + 1, squeeze=False)[0]
    highest = 0.0
    for axes, result in zip(panels, results, strict=False):
        ranks = int(result["ranks"])
        highest = max(highest, _stack(axes, measured(result), COLOURS))
        axes.set_title("1 rank, nothing sent" if ranks == 1 else f"{ranks} ranks", fontsize=10)
    for axes in panels[:-1]:
        axes.set_ylim(0, _ROOM * highest)
    _stack(panels[-1], published(), {_OTHER: "#bebada", **COLOURS})
    panels[-1].set_title("Yoon and Oh: 8 A100", fontsize=10)
    panels[0].set_ylabel("ms per step")
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(_title(results[0]), fontsize=11)
    return figure


def _title(result: Mapping[str, Any]) -> str:
    where = result["machine"].get("gpu", result["machine"]["cpu"])
    batch, density = result["batch"], 100 * result["density"]
    return f"{result['model']}, {batch} samples per rank, density {density:g} %, ranks share one {where}"


def _stack(axes: Axes, bars: Bars, colours: Mapping[str, str]) -> float:
    """Draw stacked bars with their sums; return the highest sum."""
    positions = range(len(bars))
    bottom = [0.0] * len(bars)
    for part, colour in colours.items():
        heights = [parts.get(part, 0.0) for parts in bars.values()]
        if any(heights):
            axes.bar(positions, heights, 0.7, bottom, color=colour, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for position, total in zip(positions, bottom, strict=True):
        text, place = f"{total:.3g}", (position, total)
        axes.annotate(text, place, (0, 3), textcoords="offset points", ha="center", fontsize=8, rotation=90)
    axes.set_xticks(positions, bars, rotation=90, fontsize=9)
    axes.set_ylim(0, _ROOM * max(bottom))
    return max(bottom)


def main() -> int:
    """Draw the figure from the files on the command line."""
    parser = command_line("training_step.figure", __doc__)
    parser.add_argument("results", nargs="+", type=Path, help="files of --output, one per number of ranks")
    parser.add_argument("--output", type=Path, default=Path("step"), help="path without suffix (default: step)")
    options = parser.parse_args()
    try:
        figure = draw([load(path) for path in options.results])
    except ValueError as error:
        parser.error(str(error))
    write_png(figure, options.output.with_suffix(".png"))
    figure.savefig(options.output.with_suffix(".svg"), facecolor="white", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
