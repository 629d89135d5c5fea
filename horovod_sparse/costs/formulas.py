"""Cost formulas of the sparse allreduces, one function for each, as sums over communication steps.

Bandwidth terms are those of Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP
2022), Table 1. Latency terms count the messages that this package's collectives wait for one after the other.
Selection and merging, which the table leaves out, are added. No overlap between the parts is assumed.

Units: seconds, bytes, elements (positions of a bucket) and entries (index and value: 8 bytes or 2 words in float32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from horovod_sparse.costs.coding import INDEX_BYTES, coded_bytes
from horovod_sparse.costs.network import Messages, Network


@dataclass(frozen=True)
class Compute:
    """Compute costs of a rank, in seconds.

    Attributes:
        select: Accumulation and selection, per element of the bucket.
        accumulate: Adding the gradient to the residual without selection, per element of the bucket.
        reduce: Dense allreduce beyond the time of its bytes and messages, per element added.
        merge: Summing sparse vectors, per input entry.
        cut: Keeping the larger half of a vector, per entry of the vector.
        code: Encoding and decoding an index, per entry.
    """

    select: float
    accumulate: float
    reduce: float
    merge: float
    cut: float = 0.0
    code: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one exchange, in seconds unless stated otherwise.

    Attributes:
        algorithm: Name of the algorithm.
        selection: Time to select the entries.
        bandwidth: Time for the bytes.
        latency: Time for the messages.
        merging: Time to sum the received entries and to code indices.
        nbytes: Bytes that leave a rank; if several ranks share a node, bytes that leave the node over its link.
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
class Problem:
    """Parameters of an exchange.

    Attributes:
        size: Elements n of the bucket.
        k: Number of entries that each rank selects.
        compute: Compute costs of a rank.
        itemsize: Bytes of an element.
        wire: Bytes of a value on the wire.
        coded: Whether indices are coded.
    """

    size: int
    k: int
    compute: Compute
    itemsize: int
    wire: float
    coded: bool = False

    @property
    def entry(self) -> float:
        """Bytes of an entry at the density of one rank's selection."""
        return self.entry_at(self.k)

    def entry_at(self, entries: float) -> float:
        """Return the bytes of an entry if the bucket has ``entries`` entries."""
        return (coded_bytes(entries / self.size) if self.coded else INDEX_BYTES) + self.wire

    def coding(self, written: float, read: float) -> float:
        """Return the seconds for encoding ``written`` indices and decoding ``read`` indices."""
        return self.compute.code * (written + read) / 2 if self.coded else 0.0

    @property
    def selection(self) -> float:
        """Seconds for the selection."""
        return self.compute.select * self.size

    def union(self, ranks: int) -> float:
        """Return the expected number of distinct positions that ``ranks`` ranks select: n (1 - (1 - k/n)^ranks).

        This assumes independent selections. Those of real gradients overlap more, so their union is smaller.
        """
        density = self.k / self.size
        return self.size * -math.expm1(ranks * math.log1p(-density)) if density < 1 else self.size


def _cost(algorithm: str, selection: float, steps: Sequence[Messages], merging: float) -> Cost:
    bandwidth, latency = sum(step.bandwidth for step in steps), sum(step.latency for step in steps)
    # With several nodes, the last step uses the link between nodes.
    nbytes = sum(step.nbytes for step in steps if step.link == steps[-1].link)
    return Cost(algorithm, selection, bandwidth, latency, merging, nbytes)


def _dense(problem: Problem, network: Network) -> Cost:
    """Return the cost of a dense allreduce: 2 n (P-1)/P words, no selection; merging is the summation."""
    merging = problem.compute.reduce * problem.size * network.others
    return _cost("dense", 0.0, network.allreduce(problem.size * problem.itemsize), merging)


def _shared(problem: Problem, network: Network) -> Cost:
    """Return the cost of shared indices: 2 k (P-1)/P words, a dense allreduce of k values without selection."""
    merging = problem.compute.reduce * problem.k * network.others
    selection = problem.compute.accumulate * problem.size
    return _cost("shared", selection, network.allreduce(problem.k * problem.wire), merging)


def _topka(problem: Problem, network: Network) -> Cost:
    """Return the cost of TopkA: 2 k (P-1) words; every rank merges all entries."""
    entries = problem.k * network.ranks
    steps = network.allgather(problem.entry * entries)  # in slots: lengths travel with the entries
    merging = problem.compute.merge * entries + problem.coding(problem.k, entries)
    return _cost("topka", problem.selection, steps, merging)


def _topkdsa(problem: Problem, network: Network) -> Cost:
    """Return the cost of TopkDSA: 2 k (P-1)/P words to the owners, then an allgather of their sums.

    The gathered sums have the expected fill-in, and are dense if that is shorter. Entries are merged twice, first
    within a group and then across groups; joining the gathered parts takes a quarter of the time of merging.
    """
    union = problem.union(network.ranks)
    gathered = min(problem.entry_at(union) * union, problem.wire * problem.size)
    steps = [*network.direct(problem.entry * problem.k), *network.counts(), *network.allgather(gathered)]
    merging = problem.compute.merge * (2 * problem.k + union / 4)
    merging += problem.coding(problem.k + union / network.ranks, problem.k + union)
    return _cost("topkdsa", problem.selection, steps, merging)


def _gtopk(problem: Problem, network: Network) -> Cost:
    """Return the cost of gTop-k: 4 k log2 P words, k entries up and down each level of a tree.

    On the way up, each level merges two vectors and cuts the sum to k entries.
    """
    steps = 2 * network.tree(problem.entry * problem.k)
    each_level = 2 * problem.k * (problem.compute.merge + problem.compute.cut)
    coding = problem.coding(problem.k, problem.k * (network.levels + 1))
    return _cost("gtopk", problem.selection, steps, each_level * network.levels + coding)


def _oktopk(problem: Problem, network: Network, selected: float | None = None) -> Cost:
    """Return the cost of Ok-Topk: 4 k (P-1)/P words, 2 k to the owners and 2 k gathered.

    Left out: balancing a skewed result (at most 2 k (P-1)/P more), outdated regions, and the computation of thresholds
    and regions every 32 steps or less often. Entries are merged twice, as in TopkDSA. Comparing the sums with the
    threshold and finding the returned entries takes the same time again; joining the gathered entries takes as long as
    merging them once.
    """
    entries = problem.k if selected is None else selected
    gathered = network.allgather(problem.entry * problem.k)
    steps = [*network.direct(problem.entry * entries), *network.counts(), *gathered]
    merging = problem.compute.merge * (4 * entries + problem.k)
    merging += problem.coding(entries + problem.k / network.ranks, entries + problem.k)
    return _cost("oktopk", problem.selection, steps, merging)


def _hierarchical(problem: Problem, network: Network) -> Cost:
    """Return the cost of TopkA on each node, Ok-Topk of the unions across nodes, and a broadcast on each node."""
    if not network.node:
        return replace(_topka(problem, network), algorithm="hierarchical")
    inside = Network(network.node.ranks, network.node.link)
    leaders = Network(math.ceil(network.ranks / network.node.ranks), network.link)
    inner = _topka(problem, inside)
    outer = _oktopk(problem, leaders, selected=problem.union(inside.ranks))
    broadcast = _cost("", 0.0, inside.tree(problem.entry * problem.k), 0.0)
    parts = (inner, outer, broadcast)
    return replace(
        outer,
        algorithm="hierarchical",
        bandwidth=sum(part.bandwidth for part in parts),
        latency=sum(part.latency for part in parts),
        merging=sum(part.merging for part in parts),
    )


FORMULAS: dict[str, Callable[[Problem, Network], Cost]] = {
    "dense": _dense,
    "topka": _topka,
    "topkdsa": _topkdsa,
    "gtopk": _gtopk,
    "oktopk": _oktopk,
    "hierarchical": _hierarchical,
    "shared": _shared,
}
