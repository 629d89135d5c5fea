"""Predicted time of each sparse allreduce for a size, density, world size, network and processor.

Pure arithmetic without MPI and arrays, so any world size can be predicted: Table 1 of Li and Hoefler (PPoPP 2022) plus
selection and merging; see formulas.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from horovod_sparse.costs.accuracy import KEEP
from horovod_sparse.costs.coding import coding_pays
from horovod_sparse.costs.formulas import FORMULAS, Compute, Cost, Problem
from horovod_sparse.costs.network import Link, Network, Node

__all__ = ["ALGORITHMS", "CANDIDATES", "Compute", "Cost", "break_even_bandwidth", "predict", "table"]

ALGORITHMS = tuple(FORMULAS)
# Sparse algorithms that train equally well at equal k, Ok-Topk with ``KEEP`` or more (accuracy.py): only these may be
# compared by time alone. Hierarchical, of TopkA and Ok-Topk, is another one.
CANDIDATES = ("topka", "topkdsa", "oktopk")


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
    keep: float | None = None,
) -> Cost:
    """Predict the cost of one exchange; on one rank it consists of the selection only.

    Args:
        algorithm: Name from ALGORITHMS. "dense" is the sum of this package, "rounded" the one with ``wire``, "horovod"
            that of Horovod. On one node, "hierarchical" is TopkA.
        size: Elements n of the vector.
        k: Number of entries that each rank selects, 1 .. n.
        ranks: World size P.
        link: Link between two ranks or, with ``node``, between two nodes.
        compute: Compute costs of a rank.
        itemsize: Bytes of an element.
        node: Ranks per node and their link; None: one rank per node.
        wire: Bytes of a value on the wire; None: ``itemsize``. "dense" does not round.
        indices: "coded" or "plain"; None: the faster of the two.
        keep: Option of Ok-Topk; None: as published.

    Raises:
        ValueError: The algorithm is unknown or a number is out of range.
    """
    if algorithm not in FORMULAS:
        raise ValueError(f"unknown algorithm {algorithm!r}; known are: {', '.join(ALGORITHMS)}")
    if not 1 <= k <= size:
        raise ValueError(f"k must be in 1 .. size, but k = {k} and size = {size}")
    if ranks < 1 or (node and node.ranks < 1):
        raise ValueError(f"ranks must be at least 1, not {ranks} on nodes of {node.ranks if node else 1}")
    pays = coding_pays(link.beta + link.staging, compute.code, k / size) if indices is None else indices == "coded"
    problem = Problem(size, k, compute, itemsize, wire or itemsize, pays, keep)
    cost = FORMULAS[algorithm](problem, Network(ranks, link, node))
    return cost if ranks > 1 else replace(cost, latency=0.0, merging=0.0, rounds=0)  # nothing arrives


def table(
    size: int,
    k: int,
    ranks: int,
    link: Link,
    compute: Compute,
    itemsize: int = 4,
    node: Node | None = None,
    algorithms: Iterable[str] = ("dense", *CANDIDATES),
    wire: float | None = None,
    indices: str | None = None,
    keep: float | None = KEEP,
) -> list[Cost]:
    """Return the costs of several algorithms, fastest first; see ``predict`` for the arguments."""
    costs = [predict(name, size, k, ranks, link, compute, itemsize, node, wire, indices, keep) for name in algorithms]
    return sorted(costs, key=lambda cost: cost.total)


def break_even_bandwidth(
    size: int,
    k: int,
    ranks: int,
    link: Link,
    compute: Compute,
    itemsize: int = 4,
    node: Node | None = None,
    algorithms: Iterable[str] = CANDIDATES,
    wire: float | None = None,
    keep: float | None = KEEP,
    dense: float | None = None,
) -> float:
    """Return the bandwidth in bytes/s below which the best of the algorithms beats Horovod's dense allreduce.

    Every cost is a line over the seconds per byte. The lines of an algorithm, with coded or plain indices, and of dense
    cross at one bandwidth at most. See ``predict`` for the arguments; only the latency of the link is used.
    ``dense`` is the number of bytes of an element in the dense allreduce; None: ``itemsize``.

    Returns:
        The bandwidth; infinity if an algorithm wins at any bandwidth, 0 if none sends less than dense.
    """

    def line(algorithm: str, indices: str, width: float | None = wire) -> tuple[float, float]:
        """Return the seconds at infinite bandwidth, and the bytes that take time."""
        free, unit = (
            predict(algorithm, size, k, ranks, replace(link, beta=beta), compute, itemsize, node, width, indices, keep)
            for beta in (0.0, 1.0)
        )
        return free.total, unit.bandwidth - free.bandwidth

    seconds_dense, bytes_dense = line("horovod", "plain", width=dense)
    lines = itertools.starmap(line, itertools.product(algorithms, ("plain", "coded")))
    compared = [(seconds - seconds_dense, bytes_dense - nbytes) for seconds, nbytes in lines]
    return max((saved / more if more > 0 else math.inf for more, saved in compared if saved > 0), default=0.0)
