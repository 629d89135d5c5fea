"""Predicts the time of each sparse allreduce from the size, the density, the ranks, the network and the processor.

Pure arithmetic, without MPI and arrays, and so for any number of ranks: Table 1 of Li and Hoefler (PPoPP 2022) plus
selecting and merging, as formulas.py has them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from horovod_sparse.costs.coding import coding_pays
from horovod_sparse.costs.formulas import FORMULAS, Compute, Cost, Problem
from horovod_sparse.costs.network import Link, Network, Node

__all__ = ["ALGORITHMS", "LARGEST", "Compute", "Cost", "break_even_bandwidth", "choice", "predict", "table"]

ALGORITHMS = tuple(FORMULAS)
# Those that send the largest magnitudes between single ranks. Time alone must not choose shared indices: they cost the
# least and converge the slowest.
LARGEST = ("topka", "topkdsa", "gtopk", "oktopk")
# Those that apply k entries of the sum, where the others apply all that any rank sends. With twice the density Ok-Topk
# comes near TopkA, gTop-k does not (docs/results.md): they have to be twice as fast.
_CUTTING, _HANDICAP = ("gtopk", "oktopk", "hierarchical"), 2.0


def predict(
    algorithm: str,
    size: int,
    k: int,
    ranks: int,
    link: Link,
    compute: Compute,
    itemsize: int = 4,
    node: Node | None = None,
    wire: float | None = None,
    indices: str | None = None,
) -> Cost:
    """Predicts one exchange.

    Args:
        algorithm: One of ALGORITHMS. On one node, "hierarchical" is TopkA.
        size: Elements n of the vector.
        k: Entries that each rank selects, 1 .. n.
        ranks: Number of ranks P.
        link: Between two ranks, or between two nodes.
        compute: What a rank computes.
        itemsize: Bytes of an element.
        node: How the ranks share machines; None: one rank on each.
        wire: Bytes of an element of a sparse vector on the wire; None: ``itemsize``.
        indices: "coded" or "plain"; None: coded where that is faster.

    Returns:
        The cost, which has no part but the selection on one rank.

    Raises:
        ValueError: The algorithm is unknown or a number is out of range.
    """
    if algorithm not in FORMULAS:
        raise ValueError(f"unknown algorithm {algorithm!r}; known are: {', '.join(ALGORITHMS)}")
    if not 1 <= k <= size:
        raise ValueError(f"k must be in 1 .. size, but k = {k} and size = {size}")
    if ranks < 1 or (node and node.ranks < 1):
        raise ValueError(f"ranks must be at least 1, not {ranks} on nodes of {node.ranks if node else 1}")
    pays = coding_pays(link.beta, compute.code, k / size) if indices is None else indices == "coded"
    problem = Problem(size, k, compute, itemsize, wire or itemsize, pays)
    cost = FORMULAS[algorithm](problem, Network(ranks, link, node))
    return cost if ranks > 1 else replace(cost, merging=0.0)  # nothing arrives


def table(
    size: int,
    k: int,
    ranks: int,
    link: Link,
    compute: Compute,
    itemsize: int = 4,
    node: Node | None = None,
    algorithms: Iterable[str] = ("dense", *LARGEST),
    wire: float | None = None,
    indices: str | None = None,
) -> list[Cost]:
    """The costs of several algorithms, the fastest first; arguments as for ``predict``."""
    costs = [predict(one, size, k, ranks, link, compute, itemsize, node, wire, indices) for one in algorithms]
    return sorted(costs, key=lambda cost: cost.total)


def choice(costs: Sequence[Cost]) -> Cost:
    """Picks one: dense where that is fastest, otherwise the fastest that is worth what it leaves out.

    Args:
        costs: As of ``table``, dense among them.
    """
    faster = itertools.takewhile(lambda cost: cost.algorithm != "dense", costs)
    weights = dict.fromkeys(_CUTTING, _HANDICAP)
    return min(faster, key=lambda cost: cost.total * weights.get(cost.algorithm, 1.0), default=costs[0])


def break_even_bandwidth(
    size: int,
    k: int,
    ranks: int,
    link: Link,
    compute: Compute,
    itemsize: int = 4,
    node: Node | None = None,
    algorithms: Iterable[str] = LARGEST,
) -> float:
    """The bandwidth in bytes/s below which the best of the algorithms beats the dense allreduce.

    Every cost is linear in the seconds per byte, so that each algorithm, with coded indices or plain ones, meets dense
    at one bandwidth at most. Arguments as for ``predict``; of the link, only the latency counts.

    Returns:
        Infinity where one of them wins however fast the link is, 0 where none sends less than dense.
    """

    def line(algorithm: str, indices: str) -> tuple[float, float]:
        """Seconds at infinite bandwidth, and how many more for each second per byte."""
        start, unit = (
            predict(algorithm, size, k, ranks, Link(link.alpha, beta), compute, itemsize, node, indices=indices)
            for beta in (0.0, 1.0)
        )
        return start.total, unit.bandwidth - start.bandwidth

    dense, slope = line("dense", "plain")
    lines = itertools.starmap(line, itertools.product(algorithms, ("plain", "coded")))
    gains = [(start - dense, slope - per_byte) for start, per_byte in lines]
    return max((gain / loss if loss > 0 else math.inf for loss, gain in gains if gain > 0), default=0.0)
