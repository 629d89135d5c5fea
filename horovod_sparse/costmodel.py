"""Predicts the time of each sparse allreduce from the size, the density, the ranks, the network and the processor.

Bandwidth terms are those of Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP
2022), Table 1. Latency terms count the messages that this package's collectives wait for one after the other. What
the table leaves out, selecting and merging, is added. Nothing is taken to hide anything else.

Units: seconds, bytes, elements (positions of a bucket) and entries (index and value: 8 bytes or 2 words in float32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from horovod_sparse.network import Link, Network, Node, Step

_INDEX_BYTES = 4


@dataclass(frozen=True)
class Compute:
    """What a rank computes, in seconds.

    Attributes:
        select: Per element of the bucket, for accumulating and selecting.
        accumulate: Per element of the bucket, for adding the gradient to the residual without choosing anything.
        reduce: Per element that a dense allreduce adds, beyond the time of its bytes and messages.
        merge: Per entry that goes into a sum of sparse vectors.
    """

    select: float
    accumulate: float
    reduce: float
    merge: float


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one exchange, in seconds where not said otherwise.

    Attributes:
        algorithm: Its name.
        selection: Choosing the entries.
        bandwidth: Bytes on their way.
        latency: Messages.
        merging: Adding up what arrived.
        nbytes: Bytes that leave a rank, or where several share a node, that leave the node over its link.
    """

    algorithm: str
    selection: float
    bandwidth: float
    latency: float
    merging: float
    nbytes: float

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return self.selection + self.bandwidth + self.latency + self.merging


@dataclass(frozen=True)
class _Problem:
    """What is exchanged: n elements, k of which each rank selects."""

    size: int
    k: int
    compute: Compute
    itemsize: int

    @property
    def entry(self) -> int:
        """Bytes of an entry."""
        return _INDEX_BYTES + self.itemsize

    @property
    def selection(self) -> float:
        """Seconds for choosing the entries."""
        return self.compute.select * self.size

    def union(self, ranks: int) -> float:
        """Expected number of different positions that some ranks select: n (1 - (1 - k/n)^ranks).

        Holds for selections that are independent of each other; those of real gradients agree more and fill in less.
        """
        density = self.k / self.size
        return self.size * -math.expm1(ranks * math.log1p(-density)) if density < 1 else self.size


def _cost(algorithm: str, selection: float, steps: Sequence[Step], merging: float) -> Cost:
    bandwidth, latency = sum(step.bandwidth for step in steps), sum(step.latency for step in steps)
    # Steps end on the link between nodes, where there are several nodes.
    nbytes = sum(step.nbytes for step in steps if step.link == steps[-1].link)
    return Cost(algorithm, selection, bandwidth, latency, merging, nbytes)


def _dense(problem: _Problem, network: Network) -> Cost:
    """2 n (P-1)/P words. No selection; the sums are what it computes."""
    merging = problem.compute.reduce * problem.size * network.others
    return _cost("dense", 0.0, network.allreduce(problem.size * problem.itemsize), merging)


def _shared(problem: _Problem, network: Network) -> Cost:
    """2 k (P-1)/P words: a dense allreduce of k values at positions that nobody has to search for."""
    merging = problem.compute.reduce * problem.k * network.others
    selection = problem.compute.accumulate * problem.size
    return _cost("shared", selection, network.allreduce(problem.k * problem.itemsize), merging)


def _topka(problem: _Problem, network: Network) -> Cost:
    """2 k (P-1) words; every rank merges all entries."""
    entries = problem.k * network.ranks
    steps = [*network.counts(), *network.allgather(problem.entry * entries)]
    return _cost("topka", problem.selection, steps, problem.compute.merge * entries)


def _topkdsa(problem: _Problem, network: Network) -> Cost:
    """2 k (P-1)/P words to the owners; then what they summed, filled in as expected, dense where that is shorter.

    Joining what was gathered takes as long as a pass over as many elements.
    """
    union = problem.union(network.ranks)
    gathered = min(problem.entry * union, problem.itemsize * problem.size)
    steps = [*network.direct(problem.entry * problem.k), *network.counts(), *network.allgather(gathered)]
    merging = problem.compute.merge * problem.k + problem.compute.accumulate * union
    return _cost("topkdsa", problem.selection, steps, merging)


def _gtopk(problem: _Problem, network: Network) -> Cost:
    """4 k log2 P words: k entries up and down each level; on the way up two vectors are merged and cut to k."""
    steps = 2 * network.tree(problem.entry * problem.k)
    return _cost("gtopk", problem.selection, steps, problem.compute.merge * 4 * problem.k * network.levels)


def _oktopk(problem: _Problem, network: Network, handed_in: float | None = None) -> Cost:
    """4 k (P-1)/P words: 2 k to the owners, 2 k gathered. The rank merges its region and finds what came back.

    Left out: balancing a skewed result (at most 2 k more), and thresholds and regions that are found anew every 32
    steps or less often.
    """
    entries = problem.k if handed_in is None else handed_in
    gathered = network.allgather(problem.entry * problem.k)
    steps = [*network.direct(problem.entry * entries), *network.counts(), *gathered]
    return _cost("oktopk", problem.selection, steps, problem.compute.merge * (2 * entries + problem.k))


def _hierarchical(problem: _Problem, network: Network) -> Cost:
    """TopkA on each node, Ok-Topk among the nodes' first ranks, which hand in the unions, a broadcast on each node."""
    if not network.node:
        return replace(_topka(problem, network), algorithm="hierarchical")
    inside = Network(network.node.ranks, network.node.link)
    leaders = Network(math.ceil(network.ranks / network.node.ranks), network.link)
    inner = _topka(problem, inside)
    outer = _oktopk(problem, leaders, handed_in=problem.union(inside.ranks))
    broadcast = _cost("", 0.0, inside.tree(problem.entry * problem.k), 0.0)
    parts = (inner, outer, broadcast)
    return replace(
        outer,
        algorithm="hierarchical",
        bandwidth=sum(part.bandwidth for part in parts),
        latency=sum(part.latency for part in parts),
        merging=sum(part.merging for part in parts),
    )


_ALGORITHMS: dict[str, Callable[[_Problem, Network], Cost]] = {
    "dense": _dense,
    "topka": _topka,
    "topkdsa": _topkdsa,
    "gtopk": _gtopk,
    "oktopk": _oktopk,
    "hierarchical": _hierarchical,
    "shared": _shared,
}
ALGORITHMS = tuple(_ALGORITHMS)
# Those that send the largest magnitudes between single ranks. Time alone must not choose shared indices: they cost the
# least and converge the slowest.
LARGEST = ("topka", "topkdsa", "gtopk", "oktopk")


def predict(
    algorithm: str,
    size: int,
    k: int,
    ranks: int,
    link: Link,
    compute: Compute,
    itemsize: int = 4,
    node: Node | None = None,
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

    Returns:
        The cost, which has no part but the selection on one rank.

    Raises:
        ValueError: The algorithm is unknown or a number is out of range.
    """
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; known are: {', '.join(ALGORITHMS)}")
    if not 1 <= k <= size:
        raise ValueError(f"k must be in 1 .. size, but k = {k} and size = {size}")
    if ranks < 1 or (node and node.ranks < 1):
        raise ValueError(f"ranks must be at least 1, not {ranks} on nodes of {node.ranks if node else 1}")
    cost = _ALGORITHMS[algorithm](_Problem(size, k, compute, itemsize), Network(ranks, link, node))
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
) -> list[Cost]:
    """The costs of several algorithms, the fastest first; arguments as for ``predict``."""
    costs = [predict(one, size, k, ranks, link, compute, itemsize, node) for one in algorithms]
    return sorted(costs, key=lambda cost: cost.total)


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

    Every cost is linear in the seconds per byte, so that each algorithm meets dense at one bandwidth at most.
    Arguments as for ``predict``; of the link, only the latency counts.

    Returns:
        Infinity where one of them wins however fast the link is, 0 where none sends less than dense.
    """

    def line(algorithm: str) -> tuple[float, float]:
        """Seconds at infinite bandwidth, and how many more for each second per byte."""
        start, unit = (
            predict(algorithm, size, k, ranks, Link(link.alpha, beta), compute, itemsize, node) for beta in (0.0, 1.0)
        )
        return start.total, unit.bandwidth - start.bandwidth

    dense, slope = line("dense")
    gains = [(start - dense, slope - per_byte) for start, per_byte in map(line, algorithms)]
    return max((gain / loss if loss > 0 else math.inf for loss, gain in gains if gain > 0), default=0.0)
