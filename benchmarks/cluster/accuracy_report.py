"""Table and figure of the times to reach an accuracy, from the records of the training runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import markdown
from benchmarks.cluster.network import written
from horovod_sparse.cli.image import write_png

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Training runs of one exchange at one rate."""

    rate: str
    label: str
    records: Sequence[Record]  # one per seed
    target: float  # accuracy to reach, a fraction

    def first(self, key: str) -> list[float]:
        """Return ``key`` of the first evaluation that reached the target, for each seed; infinity if none did."""
        found = ((point[key] for point in record["curve"] if point["value"] >= self.target) for record in self.records)
        return [next(values, math.inf) for values in found]

    @property
    def step(self) -> float:
        """Milliseconds per step, mean over the seeds."""
        lasts = [record["curve"][-1] for record in self.records]
        return float(mean(1e3 * last["seconds"] / last["step"] for last in lasts))

    @property
    def finals(self) -> list[float]:
        """Accuracy after the last step, for each seed."""
        return [record["curve"][-1]["value"] for record in self.records]


def outcomes(records: Sequence[Record], labels: Mapping[str, str], target: float) -> list[Outcome]:
    """Return the outcomes that have records, rate by rate.

    Args:
        records: Records of the training runs, each with its ``rate``.
        labels: Names of the runs by label.
        target: Accuracy to reach, a fraction.
    """
    found = defaultdict[tuple[str, str], list[Record]](list)
    for record in records:
        if record["curve"]:
            found[record["rate"], record["run"]].append(record)
    rates = dict.fromkeys(record["rate"] for record in records)
    keys = [(rate, label, run) for rate in rates for label, run in labels.items() if (rate, run) in found]
    return [Outcome(rate, label, found[rate, run], target) for rate, label, run in keys]


def table(found: Sequence[Outcome]) -> str:
    """Return the outcomes as a Markdown table; speedups are relative to the first outcome of each rate."""
    seconds_to = f"seconds to {found[0].target:.4g}"
    heads = ["link", "exchange", seconds_to, "speedup", "MB sent by then", "ms a step", "at the end"]
    rows = []
    for outcome in found:
        baseline = mean(next(other for other in found if other.rate == outcome.rate).first("seconds"))
        seconds = outcome.first("seconds")
        reached = math.isfinite(mean(seconds))
        cells = [
            written(outcome.rate),
            f"{outcome.label} ({len(seconds)})",
            _spread(seconds, "{:.0f}") if reached else f"not reached by {seconds.count(math.inf)}",
            f"{baseline / mean(seconds):.1f}" if reached and math.isfinite(baseline) else "",
            f"{mean(outcome.first('bytes_sent')) / 1e6:,.0f}" if reached else "",
            f"{outcome.step:.0f}",
            _spread(outcome.finals, "{:.2%}"),
        ]
        rows.append(cells)
    return markdown(heads, rows, left=2)


def _spread(numbers: Sequence[float], form: str) -> str:
    """Return mean and standard deviation as text."""
    middle = form.format(mean(numbers))
    return f"{middle} ± {form.format(stdev(numbers))}" if len(numbers) > 1 else middle


def plot(found: Sequence[Outcome], path: Path) -> None:
    """Draw the times as bars in a PNG, with one panel per rate, slowest first, and a dot for each seed."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(outcome.rate for outcome in found))
    exchanges = len({outcome.label for outcome in found})
    figure = Figure(figsize=(9, (0.3 * exchanges + 0.8) * len(rates)), layout="constrained")
    panels = figure.subplots(len(rates), squeeze=False)[:, 0]
    for rate, axes in zip(rates, panels, strict=True):
        mine = [outcome for outcome in found if outcome.rate == rate]
        mine.sort(key=lambda outcome: mean(outcome.first("seconds")), reverse=True)
        longest = max(outcome.records[0]["curve"][-1]["seconds"] for outcome in mine)
        for place, outcome in enumerate(mine):
            seconds = outcome.first("seconds")
            reached = math.isfinite(mean(seconds))
            length = mean(seconds) if reached else longest
            colour = _colour(outcome.label)
            axes.barh(place, length, color=colour if reached else "none", edgecolor=colour)
            dots = [second for second in seconds if math.isfinite(second)]
            axes.plot(dots, [place] * len(dots), "o", color="black", markersize=3)
            text = f"{length:.0f} s, {mean(outcome.first('bytes_sent')) / 1e6:,.0f} MB" if reached else "not reached"
            axes.annotate(
                f"{text}, ends at {100 * mean(outcome.finals):.1f} %",
                (max(length, *dots) if dots else length, place),
                xytext=(6, 0),
                textcoords="offset points",
                verticalalignment="center",
            )
        goal = f"{100 * found[0].target:.4g} % test accuracy"
        axes.set(
            title=f"links of {written(rate)}: time and MB that a rank sends until {goal}",
            xlabel="seconds of training (bars: mean, dots: seeds)",
        )
        axes.set_yticks(range(len(mine)), [outcome.label for outcome in mine])
        axes.margins(x=0.55)  # space for the labels next to the bars
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
    write_png(figure, path)


def _colour(label: str) -> str:
    """Return the color of an exchange: grey for those of Horovod and DDP, its own for the recommended preset."""
    if label.startswith("recommended"):
        return "C3"
    return "darkgrey" if label.startswith(("Horovod", "DDP")) else "C0"
