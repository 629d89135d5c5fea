"""Measured times of the collectives, compared with the dense ring and the cost model: tables, verdict and figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster.network import written
from horovod_sparse.cli.image import write_png
from horovod_sparse.costs.model import Compute
from horovod_sparse.costs.network import Link

NEAR = 1.2  # a choice within this factor of the fastest counts as good
CLOSE = 1.5  # a prediction within this factor of the measured time counts as close


@dataclass(frozen=True)
class Row:
    """One algorithm in one cell; times in milliseconds, selection included."""

    algorithm: str
    measured: float  # on the slowest rank, median over the iterations
    best: float  # on the slowest rank, in the fastest iteration
    exchange: float  # without the selection, on the rank that arrived last and waited least
    predicted: float
    wire_bytes: float  # sent per rank, averaged over the ranks


@dataclass(frozen=True)
class Cell:
    """All algorithms at one rate, number of ranks and density; link and compute costs are measured, in seconds."""

    rate: str
    ranks: int  # each on a separate node
    density: float
    size: int  # elements of a vector
    link: Link
    compute: Compute
    rows: Sequence[Row]

    @property
    def fastest(self) -> Row:
        """Algorithm with the smallest measured time."""
        return min(self.rows, key=lambda row: row.measured)

    @property
    def choice(self) -> Row:
        """Algorithm with the smallest predicted time."""
        return min(self.rows, key=lambda row: row.predicted)

    @property
    def loss(self) -> float:
        """Measured time of the choice divided by that of the fastest algorithm."""
        return self.choice.measured / self.fastest.measured

    def speedup(self, row: Row) -> float | None:
        """Return the time of the dense ring divided by an algorithm's; None if the ring was not measured."""
        dense = next((other for other in self.rows if other.algorithm == "dense"), None)
        return dense.measured / row.measured if dense else None


def table(cells: Sequence[Cell]) -> str:
    """Return the table of the cells of one rate and number of ranks."""
    first = cells[0]
    link = (
        f"{1e6 * first.link.alpha:.0f} us per message, {8e-6 / first.link.beta:.0f} Mbit/s" if first.link.beta else ""
    )
    names = ("algorithm", "ms", "best ms", "exchange", "predicted", "MB sent", "vs dense ring")
    lines = [
        f"\n{first.rate}, {first.ranks} ranks, n = {first.size:,} (float32); measured link: {link}",
        "{:>8}  {:10}{:>10}{:>10}{:>10}{:>11}{:>9}{:>15}".format("density", *names),
    ]
    for cell in cells:
        lines += [_line(cell, row) for row in sorted(cell.rows, key=lambda row: row.measured)]
    return "\n".join(lines)


def _line(cell: Cell, row: Row) -> str:
    speedup = cell.speedup(row)
    ratio = "" if speedup is None else f"{speedup:.2f}x"
    chosen = "  <- predicted to be first" if row is cell.choice else ""
    return (
        f"{cell.density:8g}  {row.algorithm:10}{row.measured:10.1f}{row.best:10.1f}{row.exchange:10.1f}"
        f"{row.predicted:11.1f}{row.wire_bytes / 1e6:9.2f}{ratio:>15}{chosen}"
    )


def verdict(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the number of good choices, the choices that are not, and the ratios of measured to predicted times."""
    good = [cell for cell in cells if cell.loss <= NEAR]
    errors: dict[str, list[float]] = {}
    for cell in cells:
        for row in cell.rows:
            errors.setdefault(row.algorithm, []).append(row.measured / row.predicted)
    close = [1 / CLOSE <= ratio <= CLOSE for ratios in errors.values() for ratio in ratios]
    return {
        "cells": len(cells),
        "good": len(good),
        "first": sum(cell.choice is cell.fastest for cell in cells),
        "missed": [
            f"{cell.rate}, {cell.ranks} ranks, density {cell.density:g}: {cell.choice.algorithm} takes {cell.loss:.2f} "
            f"times as long as {cell.fastest.algorithm}"
            for cell in cells
            if cell.loss > NEAR
        ],
        f"share of predictions within a factor of {CLOSE}": sum(close) / len(close),
        "measured to predicted, median": {name: median(ratios) for name, ratios in errors.items()},
    }


def as_json(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the cells with their derived values."""
    return [
        {
            **asdict(cell),
            "speedups": {row.algorithm: cell.speedup(row) for row in cell.rows},
            "fastest": cell.fastest.algorithm,
            "choice": cell.choice.algorithm,
            "loss": cell.loss,
        }
        for cell in cells
    ]


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Draw measured over predicted times in a PNG, with one panel per rate and what its sides mean."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(cell.rate for cell in cells))
    figure = Figure(figsize=(6 * len(rates), 5.5), layout="constrained")
    for axes, rate in zip(figure.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        here = [(cell.ranks, row) for cell in cells if cell.rate == rate for row in cell.rows]
        for algorithm in sorted({row.algorithm for _, row in here}):
            points = [(ranks, row.predicted, row.measured) for ranks, row in here if row.algorithm == algorithm]
            ranks, predicted, measured = zip(*points, strict=True)
            axes.scatter(predicted, measured, s=[12 * count for count in ranks], alpha=0.7, label=algorithm)
        times = [time for _, row in here for time in (row.predicted, row.measured)]
        ends = [min(times) / 1.5, max(times) * 1.5]
        axes.plot(ends, ends, color="grey", linewidth=1)
        axes.fill_between(ends, [end / NEAR for end in ends], [end * NEAR for end in ends], color="grey", alpha=0.2)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal", title=f"links of {written(rate)}")
        axes.set(xlabel="predicted milliseconds", ylabel="measured milliseconds (larger dots: more ranks)")
        side: dict[str, Any] = {"transform": axes.transAxes, "style": "italic", "color": "dimgrey"}
        axes.text(0.03, 0.97, "above the line: slower than predicted", **side, va="top")
        axes.text(0.97, 0.03, "below the line: faster than predicted", **side, ha="right")
        axes.grid(which="both", alpha=0.3)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.06))
    write_png(figure, path)
