"""Table and figure of the times to an accuracy, from the records of the trainings."""

from __future__ import annotations

import math
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

    @property
    def curve(self) -> tuple[list[float], list[float]]:
        """Seconds and accuracy at every evaluation, means over the seeds."""
        points = list(zip(*(record["curve"] for record in self.records), strict=False))  # one may have diverged
        seconds, values = ([mean(one[key] for one in same) for same in points] for key in ("seconds", "value"))
        return seconds, values


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
            one.rate,
            f"{one.label} ({len(seconds)})",
            _spread(seconds, "{:.3g}") if reached else f"not reached by {seconds.count(math.inf)}",
            f"{baseline / mean(seconds):.1f}" if reached and math.isfinite(baseline) else "",
            f"{mean(one.first('bytes_sent')) / 1e6:,.0f}" if reached else "",
            f"{one.step:.0f}",
            _spread(one.finals, "{:.2%}"),
        ]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def _spread(numbers: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    middle = form.format(mean(numbers))
    return f"{middle} ± {form.format(stdev(numbers))}" if len(numbers) > 1 else middle


def plot(found: Sequence[Outcome], path: Path) -> None:
    """Draws accuracy over time, one panel for each rate, as PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    rates = list(dict.fromkeys(one.rate for one in found))
    labels = list(dict.fromkeys(one.label for one in found))
    figure = Figure(figsize=(max(8, 5 * len(rates)), 4.6), layout="constrained")
    panels = figure.subplots(1, len(rates), squeeze=False, sharey=True)[0]
    for rate, axes in zip(rates, panels, strict=True):
        for one in (one for one in found if one.rate == rate):
            number = labels.index(one.label)
            colour = "black" if number == 0 else f"C{number - 1}"
            axes.plot(*one.curve, color=colour, linewidth=2, label=one.label)
        axes.axhline(found[0].target, color="grey", linestyle=":")
        axes.set(title=f"links of {rate}", xlabel="seconds of training", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter("{:g}".format))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(which="both", alpha=0.25)
    ends = [value for one in found for value in one.finals]
    panels[0].set(ylabel="test accuracy", ylim=(max(0.0, 1 - 2.5 * (1 - min(ends))), max(ends) + 0.1 * (1 - max(ends))))
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    figure.legend([lines[label] for label in labels], labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format="png", dpi=120)
