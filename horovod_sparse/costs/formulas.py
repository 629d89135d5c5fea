"""Costs of each sparse allreduce, one function for each, of the steps that it consists of.

Bandwidth terms are those of Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP
2022), Table 1. Latency terms count the messages that this package's collectives wait for one after the other. What
the table leaves out, selecting and merging, is added. Nothing is taken to hide anything else.

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
    """Work of a rank, in seconds.

    Attributes:
        select: Per element of the bucket, for accumulating and selecting.
        accumulate: Per element of the bucket, for adding the gradient to the residual without choosing anything.
        reduce: Per element that a dense allreduce adds, beyond the time of its bytes and messages.
        merge: Per entry that goes into a sum of sparse vectors.
        cut: Per entry of a vector of which the larger half is kept.
        code: Per entry whose index is coded and decoded.
    """

    select: float
    accumulate: float
    reduce: float
    merge: float
    cut: float = 0.0
    code: float = 0.0


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
class Problem:
    """An exchange: n elements of ``itemsize`` bytes, k of which each rank selects and sends in ``wire`` bytes.

    ``coded`` says whether their indices are coded.
    """

    size: int
    k: int
    compute: Compute
    itemsize: int
    wire: float
    coded: bool = False

    @property
    def entry(self) -> float:
        """Bytes of an entry, at the density of a rank's own."""
        return self.entry_at(self.k)

    def entry_at(self, entries: float) -> float:
        """Bytes of an entry, of so many in the bucket."""
        return (coded_bytes(entries / self.size) if self.coded else INDEX_BYTES) + self.wire

    def coding(self, written: float, read: float) -> float:
        """Seconds for the indices of so many entries written and read."""
        return self.compute.code * (written + read) / 2 if self.coded else 0.0

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


def _cost(algorithm: str, selection: float, steps: Sequence[Messages], merging: float) -> Cost:
    bandwidth, latency = sum(step.bandwidth for step in steps), sum(step.latency for step in steps)
    # Steps end on the link between nodes, where there are several nodes.
    nbytes = sum(step.nbytes for step in steps if step.link == steps[-1].link)
    return Cost(algorithm, selection, bandwidth, latency, merging, nbytes)


def _dense(problem: Problem, network: Network) -> Cost:
    """2 n (P-1)/P words. No selection; the sums are what it computes."""
    merging = problem.compute.reduce * problem.size * network.others
    return _cost("dense", 0.0, network.allreduce(problem.size * problem.itemsize), merging)


def _shared(problem: Problem, network: Network) -> Cost:
    """2 k (P-1)/P words: a dense allreduce of k values at positions that nobody has to search for."""
    merging = problem.compute.reduce * problem.k * network.others
    selection = problem.compute.accumulate * problem.size
    return _cost("shared", selection, network.allreduce(problem.k * problem.wire), merging)


def _topka(problem: Problem, network: Network) -> Cost:
    """2 k (P-1) words; every rank merges all entries."""
    entries = problem.k * network.ranks
    steps = [*network.counts(), *network.allgather(problem.entry * entries)]
    merging = problem.compute.merge * entries + problem.coding(problem.k, entries)
    return _cost("topka", problem.selection, steps, merging)


def _topkdsa(problem: Problem, network: Network) -> Cost:
    """2 k (P-1)/P words to the owners; then what they summed, filled in as expected, dense where that is shorter.

    Entries are merged twice, with the others of a group and then all together; joining takes a quarter of merging.
    """
    union = problem.union(network.ranks)
    gathered = min(problem.entry_at(union) * union, problem.wire * problem.size)
    steps = [*network.direct(problem.entry * problem.k), *network.counts(), *network.allgather(gathered)]
    merging = problem.compute.merge * (2 * problem.k + union / 4)
    merging += problem.coding(problem.k + union / network.ranks, problem.k + union)
    return _cost("topkdsa", problem.selection, steps, merging)


def _gtopk(problem: Problem, network: Network) -> Cost:
    """4 k log2 P words: k entries up and down each level; on the way up two vectors are merged and cut to k."""
    steps = 2 * network.tree(problem.entry * problem.k)
    each_level = 2 * problem.k * (problem.compute.merge + problem.compute.cut)
    coding = problem.coding(problem.k, problem.k * (network.levels + 1))
    return _cost("gtopk", problem.selection, steps, each_level * network.levels + coding)


def _oktopk(problem: Problem, network: Network, handed_in: float | None = None) -> Cost:
    """4 k (P-1)/P words: 2 k to the owners, 2 k gathered.

    Left out: balancing a skewed result (at most 2 k (P-1)/P more), regions that no longer fit, and thresholds and
    regions that are found anew every 32 steps or less often. Entries are merged twice, as in TopkDSA; comparing the
    sums with the threshold and finding what came back takes as long again, joining what was gathered as long as merging
    it once.
    """
    entries = problem.k if handed_in is None else handed_in
    gathered = network.allgather(problem.entry * problem.k)
    steps = [*network.direct(problem.entry * entries), *network.counts(), *gathered]
    merging = problem.compute.merge * (4 * entries + problem.k)
    merging += problem.coding(entries + problem.k / network.ranks, entries + problem.k)
    return _cost("oktopk", problem.selection, steps, merging)


def _hierarchical(problem: Problem, network: Network) -> Cost:
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


FORMULAS: dict[str, Callable[[Problem, Network], Cost]] = {
    "dense": _dense,
    "topka": _topka,
    "topkdsa": _topkdsa,
    "gtopk": _gtopk,
    "oktopk": _oktopk,
    "hierarchical": _hierarchical,
    "shared": _shared,
}
