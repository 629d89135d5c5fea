"""Table and figure of the times to an accuracy, from the records of the trainings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The trainings of one exchange at one rate.

    Attributes:
        rate: Of the links.
        label: What the exchange is called.
        records: The trainings, one a seed.
        target: The accuracy to reach, a fraction.
    """

    rate: str
    label: str
    records: Sequence[Record]
    target: float

    def first(self, key: str) -> list[float]:
        """A value of the first evaluation at the target, for each seed; infinite where there is none."""
        found = ((point[key] for point in one["curve"] if point["value"] >= self.target) for one in self.records)
        return [next(values, math.inf) for values in found]

    @property
    def step(self) -> float:
        """Milliseconds of a step, mean over the seeds."""
        lasts = [record["curve"][-1] for record in self.records]
        return float(mean(1e3 * last["seconds"] / last["step"] for last in lasts))

    @property
    def finals(self) -> list[float]:
        """The accuracy after the last step, for each seed."""
        return [record["curve"][-1]["value"] for record in self.records]


def outcomes(records: Sequence[Record], labels: Mapping[str, str], target: float) -> list[Outcome]:
    """What there are records of, rate by rate.

    Args:
        records: Of the trainings, each with its ``rate``.
        labels: Names of the runs, by what they are called.
        target: The accuracy to reach, a fraction.
    """
    rates = list(dict.fromkeys(record["rate"] for record in records))
    return [
        Outcome(rate, label, mine, target)
        for rate in rates
        for label, run in labels.items()
        if (
            mine := [record for record in records if (record["rate"], record["run"]) == (rate, run) and record["curve"]]
        )
    ]


def table(found: Sequence[Outcome]) -> str:
    """The outcomes as a table in Markdown; those of a rate are compared with the first of it."""
    names = (
        "link",
        "exchange",
        f"seconds to {found[0].target:.4g}",
        "speedup",
        "MB sent by then",
        "ms a step",
        "at the end",
    )
    lines = [" | ".join(names), " | ".join(["---", "---", *["---:"] * 5])]
    for one in found:
        baseline = mean(next(other for other in found if other.rate == one.rate).first("seconds"))
        seconds = one.first("seconds")
        reached = math.isfinite(mean(seconds))
        cells = [
            _written(one.rate),
            f"{one.label} ({len(seconds)})",
            _spread(seconds, "{:.0f}") if reached else f"not reached by {seconds.count(math.inf)}",
            f"{baseline / mean(seconds):.1f}" if reached and math.isfinite(baseline) else "",
            f"{mean(one.first('bytes_sent')) / 1e6:,.0f}" if reached else "",
            f"{one.step:.0f}",
            _spread(one.finals, "{:.2%}"),
        ]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def _written(rate: str) -> str:
    """A rate as people write it: 100 Mbit/s for 100mbit."""
    return re.sub(r"([\d.]+)([kmg])bit", lambda part: f"{part[1]} {part[2].upper().replace('K', 'k')}bit/s", rate)


def _spread(numbers: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    middle = form.format(mean(numbers))
    return f"{middle} ± {form.format(stdev(numbers))}" if len(numbers) > 1 else middle


def plot(found: Sequence[Outcome], path: Path) -> None:
    """Draws the times as bars, with a dot for each seed and one panel for each rate, as PNG."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(one.rate for one in found))
    labels = list(dict.fromkeys(one.label for one in found))
    figure = Figure(figsize=(8, (0.3 * len(labels) + 0.8) * len(rates)), layout="constrained")
    panels = figure.subplots(len(rates), squeeze=False)[:, 0]
    for rate, axes in zip(rates, panels, strict=True):
        mine = [one for one in found if one.rate == rate]
        longest = max(one.records[0]["curve"][-1]["seconds"] for one in mine)
        for one in mine:
            place = labels.index(one.label)
            seconds = one.first("seconds")
            reached = math.isfinite(mean(seconds))
            length = mean(seconds) if reached else longest
            axes.barh(place, length, color=_colour(one.label) if reached else "none", edgecolor=_colour(one.label))
            dots = [second for second in seconds if math.isfinite(second)]
            axes.plot(dots, [place] * len(dots), "o", color="black", markersize=3)
            text = f"{length:.0f} s, {mean(one.first('bytes_sent')) / 1e6:,.0f} MB" if reached else "not reached"
            axes.annotate(
                f"{text}, ends at {mean(one.finals):.1%}",
                (max(length, *dots) if dots else length, place),
                xytext=(6, 0),
                textcoords="offset points",
                verticalalignment="center",
            )
        axes.set(title=f"links of {_written(rate)}", xlabel=f"seconds of training to {found[0].target:.0%} accuracy")
        axes.set_yticks(range(len(labels)), labels)
        axes.margins(x=0.7)  # room for the words behind the bars
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
    figure.savefig(path, format="png", dpi=120)


def _colour(label: str) -> str:
    """Others are grey."""
    return "darkgrey" if label.startswith(("Horovod", "DDP")) else "C0"
