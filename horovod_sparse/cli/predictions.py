"""Predicted exchange and step times of what a user may choose as compression, for `horovod-sparse advise`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from horovod_sparse.costs.accuracy import sums
from horovod_sparse.costs.model import CANDIDATES, Compute, Cost, predict, table
from horovod_sparse.costs.network import Link, Node
from horovod_sparse.costs.step import buckets, exposed

ITEM_BYTES = 4  # float32
WIDTHS = {"float16": 2.0, "log8": 1.0, "log4": 0.5}  # bytes


@functools.cache
def preset() -> Any:
    """Return the preset `recommended`, imported late, so that the command line starts without NumPy."""
    from horovod_sparse.config import Compression

    return Compression.recommended()


@dataclass(frozen=True)
class Plan:
    """Input of a prediction.

    Attributes:
        size: Number of parameters.
        ranks: World size.
        link: Link between ranks or, with ``node``, between nodes.
        compute: Compute costs of a rank.
        node: Ranks per node and their link; None: one rank per node, or a single node.
        dense_bandwidth: Bus bandwidth of Horovod's dense allreduce in bytes/s; None: it sends over ``link``.
        computing: Seconds of a step without exchange; 0: not known.
        width: Bytes of a gradient without compression. Ours are float32 before they are rounded.
        adaptive: Whether the optimizer is adaptive, for which Ok-Topk sends more sums.
    """

    size: int
    ranks: int
    link: Link
    compute: Compute
    node: Node | None
    dense_bandwidth: float | None = None
    computing: float = 0.0
    width: float = ITEM_BYTES
    adaptive: bool = False

    @property
    def bandwidth(self) -> float:
        """Bandwidth of the link in bytes/s."""
        return 1 / self.link.beta

    def at(self, bandwidth: float) -> Plan:
        """Return the same plan with a link of this bandwidth in bytes/s."""
        return replace(self, link=replace(self.link, beta=1 / bandwidth))

    def bucket(self, density: float, parts: int = 1) -> dict[str, Any]:
        """Return the arguments of the cost model for one of several equal buckets."""
        size = math.ceil(self.size / parts)
        cluster = {"ranks": self.ranks, "link": self.link, "compute": self.compute, "node": self.node}
        keep = sums("auto", self.ranks, self.adaptive)
        return {"size": size, "k": max(1, round(density * size)), "keep": keep, **cluster}

    def parts(self, *, dense: bool) -> int:
        """Return the number of buckets of a preset that always sends everything, or of one that does not."""
        return buckets(self.size * ITEM_BYTES, dense)

    @property
    def collectives(self) -> tuple[str, ...]:
        """Sparse collectives that `auto` compares; nodes sum up first only if they have equal numbers of ranks."""
        nested = self.node is not None and self.ranks % self.node.ranks == 0
        return (*CANDIDATES, "hierarchical") if nested else CANDIDATES


@dataclass(frozen=True)
class Row:
    """Prediction for one compression.

    Attributes:
        compression: Name and settings, as ``hvs.parse`` and ``examples/train.py --compression`` take them.
        code: The argument ``compression`` in Python.
        density: Fraction of the gradients that a rank sends.
        cost: Cost of the exchange of all gradients.
        exposed: Seconds of the exchange that the backward pass does not hide.
        step: Seconds of a step; if its computing time is not known, those of the exchange.
    """

    compression: str
    code: str
    density: float
    cost: Cost
    exposed: float
    step: float


def dense_rows(plan: Plan) -> list[Row]:
    """Return the rows of what sends everything: Horovod's own exchanges, and this package's in fewer bits."""
    parts = plan.parts(dense=True)
    arguments = plan.bucket(1.0, parts)

    def horovod(width: float) -> Cost:
        cost = predict("horovod", **arguments, wire=width)
        if plan.dense_bandwidth is None:
            return cost
        return replace(cost, bandwidth=cost.nbytes / plan.dense_bandwidth, latency=0.0)

    costs = {
        ("none", "hvd.Compression.none"): horovod(plan.width),
        ("fp16", "hvd.Compression.fp16"): horovod(WIDTHS["float16"]),
    }
    if plan.width == WIDTHS["float16"]:
        del costs["fp16", "hvd.Compression.fp16"]
    for wire in ("float16", "log8"):
        names = (f"dense:wire={wire}", f"hvs.Compression.dense(wire={wire!r})")
        costs[names] = predict("rounded", **arguments, wire=WIDTHS[wire])
    return [_row(plan, *names, 1.0, cost, parts) for names, cost in costs.items()]


def sparse_rows(plan: Plan, density: float | None) -> tuple[list[Row], Row | None]:
    """Return rows of `recommended`, and the one that is chosen.

    Without a density, there is a row for each density that it tries, the largest first, with the collective that it
    takes. It chooses by the times of steps, one of these or of the rounded rows of ``dense_rows``: none is chosen if
    their computing time is not known. With a density, there is a row for each collective, fastest first. The first is
    chosen; none if dense is faster than all.
    """
    if density is None:
        schedule = preset().schedule
        rows = [_fastest(plan, one) for one in sorted(schedule.densities, reverse=True)]
        rounded = [row for row in dense_rows(plan) if row.cost.algorithm == "rounded"]
        candidates = sorted([*rows, *rounded], key=lambda row: row.density, reverse=True)  # stable: rounded after exact
        if schedule.spare and hardly_slower(candidates) == candidates[-1:]:
            rows.append(_fastest(plan, schedule.least))
            candidates.append(rows[-1])
        return rows, hardly_slower(candidates)[0] if plan.computing else None
    costs = _costs(plan, density)
    rows = [_sparse_row(plan, density, cost, cost.algorithm) for cost in costs if cost.algorithm != "dense"]
    return rows, None if costs[0].algorithm == "dense" else rows[0]


def _fastest(plan: Plan, density: float) -> Row:
    return _sparse_row(plan, density, _costs(plan, density)[0])


def hardly_slower(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose steps take hardly longer than the shortest, as the preset's ``max_exposed`` has it."""
    limit = (1 + preset().schedule.max_exposed) * min(row.step for row in rows)
    return [row for row in rows if row.step <= limit]


def _costs(plan: Plan, density: float) -> list[Cost]:
    """Return the costs of a bucket, fastest first; at density 1 everything is sent by a dense allreduce."""
    arguments = plan.bucket(density, plan.parts(dense=False))
    algorithms = ("dense", *plan.collectives) if density < 1 else ("dense",)
    return table(**arguments, algorithms=algorithms, wire=WIDTHS[preset().collective.wire])


def _sparse_row(plan: Plan, density: float, cost: Cost, collective: str = "") -> Row:
    text = f"recommended:density={density:g}" + f",collective={collective}" * bool(collective)
    code = f"hvs.Compression.recommended(density={density:g}{f', {collective=}' if collective else ''})"
    return _row(plan, text, code, density, cost, plan.parts(dense=False))


def _row(plan: Plan, compression: str, code: str, density: float, cost: Cost, parts: int) -> Row:
    total = cost.times(parts)
    shown = exposed(total.total, plan.computing, parts)
    return Row(compression, code, density, total, shown, plan.computing + shown)
