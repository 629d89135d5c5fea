"""Table and figure of the demo."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse.cli.image import write_png

# Row of the table: key of ms_per_step, label.
STAGES = (
    ("step", "time per step in ms"),
    ("forward", "  forward"),
    ("backward", "  backward"),
    ("select", "  accumulate+select *"),
    ("agree", "  agree *"),
    ("exchange", "  exchange *"),
    ("apply", "  apply *"),
    ("synchronize", "  wait for the exchange"),
    ("update", "  update"),
)
NOTE = "* on a worker thread, during backward; a dense exchange shows only as waiting time. Medians over epochs."

# Rough time of a ResNet-50 step on a GPU, and the number of parameters of ResNet-50.
_GPU_SECONDS, _RESNET50 = 0.1, 25.6e6


@dataclass(frozen=True)
class Run:
    """Run of train.py.

    Attributes:
        name: Name of the output folder.
        content: Content of result.json, as written by examples/record.py.
    """

    name: str
    content: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the results in an output folder."""
        return cls(folder.name, json.loads((folder / "result.json").read_text()))

    @property
    def last(self) -> dict[str, Any]:
        """Record of the last epoch."""
        epochs: list[dict[str, Any]] = self.content["epochs"]
        return epochs[-1]

    def curve(self, key: str) -> list[float]:
        """Return the values of a key, one per epoch."""
        return [epoch[key] for epoch in self.content["epochs"]]

    def ms(self, stage: str) -> float | None:
        """Return the median time of a stage in ms per step; None if the run does not measure the stage."""
        dense = self.content["configuration"]["compression"] in ("none", "fp16")
        if dense and stage in ("select", "agree", "exchange", "apply"):
            return None
        return float(median(epoch["ms_per_step"][stage] for epoch in self.content["epochs"]))


def table(runs: Mapping[str, Mapping[str, Run]]) -> str:
    """Return the comparison as text.

    Args:
        runs: The runs by location and name. Speedups are relative to the first run of each location.
    """
    columns = [(next(iter(here.values())), run) for here in runs.values() for run in here.values()]
    rows = [
        ("", [name for here in runs.values() for name in here]),
        ("samples/s", [f"{speed(run):,.0f}" for _, run in columns]),
        ("  speedup", [f"{speed(run) / speed(dense):.2f}x" for dense, run in columns]),
        ("test accuracy", [f"{run.last['test_accuracy']:.2%}" for _, run in columns]),
        ("bytes sent per step and rank", [f"{median(run.curve('bytes_per_step')):,.0f}" for _, run in columns]),
        *((label, [_cell(run.ms(stage)) for _, run in columns]) for stage, label in STAGES),
    ]
    width = 9
    first = max(len(label) for label, _ in rows)
    places = "".join(f"   {place:^{width * len(here)}}" for place, here in runs.items())
    lines = [f"{'':{first}}{places}".rstrip()]
    ends = set(itertools.accumulate(map(len, runs.values()), initial=0))
    for label, cells in rows:
        spaced = (f"{'   ' if number in ends else ''}{cell:>{width}}" for number, cell in enumerate(cells))
        lines.append(f"{label:{first}}{''.join(spaced)}")
    return "\n".join([*lines, NOTE])


def speed(run: Run) -> float:
    """Return the samples per second of all ranks together."""
    return float(median(run.curve("samples_per_second")))


def _cell(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}"


def meaning(dense: Run, rate: int) -> str:
    """Return a text that compares the dense run's links, with their rate in bit/s, to those of a GPU cluster."""
    computing = sum(dense.ms(stage) or 0.0 for stage in ("forward", "backward", "update")) / 1e3
    sending = median(dense.curve("bytes_per_step")) * 8 / rate
    ranks = dense.content["ranks"]
    bits = 2 * (ranks - 1) / ranks * 32 * _RESNET50
    like = bits / (sending / computing * _GPU_SECONDS) / 1e9
    return (
        f"What the slow links correspond to: a step computes for {1e3 * computing:.0f} ms here, and sending its dense "
        f"gradients takes\n{1e3 * sending:.0f} ms, {sending / computing:.1f} times as long. The ratio is the same if "
        f"GPUs compute a step of ResNet-50 in {1e3 * _GPU_SECONDS:.0f} ms\nand send its {_RESNET50 / 1e6:.1f} million "
        f"gradients over links of {like:.1f} Gbit/s."
    )


def plot(runs: Sequence[Run], place: str, path: Path) -> None:
    """Plot accuracy over wall time and over bytes sent, as PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter

    colours = {"dense": "black", "fp16": "grey"}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    time, traffic = figure.subplots(1, 2, sharey=True)
    for run in runs:
        steps = run.content["steps_per_epoch"]
        seconds = list(
            itertools.accumulate(steps * epoch["ms_per_step"]["step"] / 1e3 for epoch in run.content["epochs"])
        )
        for axes, places in ((time, seconds), (traffic, run.curve("bytes_sent"))):
            axes.plot(
                places, run.curve("test_accuracy"), color=colours.get(run.name, "C3"), label=run.name, linewidth=2
            )
    time.set(title=f"{place}: accuracy over time", xlabel="seconds of training", ylabel="test accuracy")
    traffic.set(title="accuracy over traffic", xlabel="bytes sent by a rank", xscale="log")
    traffic.xaxis.set_major_formatter(EngFormatter("B"))
    worst = min(run.last["test_accuracy"] for run in runs)
    time.set_ylim(max(0.0, 1 - 8 * (1 - worst)), 1.0)  # shows the range in which the runs end
    time.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (time, traffic):
        axes.grid(alpha=0.3)
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs), frameon=False)
    write_png(figure, path)
