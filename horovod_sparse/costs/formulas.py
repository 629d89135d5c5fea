"""Cost formulas of the sparse allreduces, one function for each, as sums over communication steps.

Bandwidth terms are those of Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP
2022), Table 1. Latency terms count the messages that this package's collectives wait for one after the other.
Selection and merging, which the table leaves out, are added. No overlap between the parts is assumed.

A cost is that of one step of a bucket, from its gradients to their average in the same place.

Units: seconds, bytes, elements (positions of a bucket) and entries (index and value: 8 bytes or 2 words in float32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from horovod_sparse.costs.coding import INDEX_BYTES, coded_bytes
from horovod_sparse.costs.network import Messages, Network

# Passes over a bucket that is rounded, besides conversions: its residual and its errors are added, the average written.
_PASSES = 5
# Time of a conversion to a shorter floating-point number, as a part of the time of a conversion to levels.
_SHORT_FLOAT = 1 / 3
# Exchanges of a split that are in flight together, by default (option ``throttle``).
_THROTTLE = 4
# Sums of a histogram for Ok-Topk's exact threshold, and bytes of a rank's histogram (collectives/magnitude.py).
_HISTOGRAMS, _HISTOGRAM_BYTES = 4, 1024
# Passes over its region of an owner that keeps sums: they are copied, compared, and searched for the exact threshold.
_OWNED = 3


@dataclass(frozen=True)
class Compute:
    """Compute costs of a rank, in seconds.

    Attributes:
        select: Accumulation and selection at a low density, per element of the bucket.
        accumulate: Adding the gradient to the residual without selection, per element of the bucket.
        reduce: Dense allreduce beyond the time of its bytes and messages, and writing the average, per element added.
        merge: Summing sparse vectors and writing the average, per input entry.
        cut: Keeping the larger half of a vector, per entry of the vector.
        code: Encoding and decoding an index, per entry.
        convert: Rounding a value to levels of 8 or 4 bits, encoding and decoding it, per value.
        wait: Waiting for a round of messages beyond the link's latency, per round: between a GPU and the host.
    """

    select: float
    accumulate: float
    reduce: float
    merge: float
    cut: float = 0.0
    code: float = 0.0
    convert: float = 0.0
    wait: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one exchange, in seconds unless stated otherwise.

    Attributes:
        algorithm: Name of the algorithm.
        selection: Time to select the entries.
        bandwidth: Time for the bytes.
        latency: Time for the messages.
        merging: Time to sum the received entries, and to code indices and values.
        nbytes: Bytes that leave a rank; if several ranks share a node, bytes that leave the node over its link.
        rounds: Number of rounds of messages; see ``Traffic``. The agreement shares the first one.
    """

    algorithm: str
    selection: float
    bandwidth: float
    latency: float
    merging: float
    nbytes: float
    rounds: int = 0

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return self.selection + self.bandwidth + self.latency + self.merging

    def times(self, count: int) -> Cost:
        """Return the cost of ``count`` such exchanges, one after the other."""
        names = ("selection", "bandwidth", "latency", "merging", "nbytes", "rounds")
        return replace(self, **{name: count * getattr(self, name) for name in names})


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
        keep: Sums in Ok-Topk's total as a multiple of k, if owners keep the others; None: as published.
    """

    size: int
    k: int
    compute: Compute
    itemsize: int
    wire: float
    coded: bool = False
    keep: float | None = None

    @property
    def entry(self) -> float:
        """Bytes of an entry at the density of one rank's selection."""
        return self.entry_at(self.k)

    def entry_at(self, entries: float) -> float:
        """Return the bytes of an entry if the bucket has ``entries`` entries."""
        return (coded_bytes(entries / self.size) if self.coded else INDEX_BYTES) + self.wire

    @property
    def sums(self) -> float:
        """Number of sums that Ok-Topk's total has."""
        return min(self.k * (1.0 if self.keep is None else self.keep), self.size)

    @property
    def rounded(self) -> bool:
        """True if values are rounded for the wire."""
        return self.wire < self.itemsize

    def converting(self, written: float, read: float) -> float:
        """Return the seconds for rounding and encoding ``written`` values and decoding ``read`` values."""
        convert = self.compute.convert * (_SHORT_FLOAT if self.wire >= 2 else 1.0)
        return convert * (written + read) / 2 if self.rounded else 0.0

    def coding(self, written: float, read: float) -> float:
        """Return the seconds for encoding ``written`` entries and decoding ``read`` entries: indices and values.

        The rounding errors of entries are collected, and merged with what else returns.
        """
        indices = self.compute.code * (written + read) / 2 if self.coded else 0.0
        errors = 2 * self.compute.merge * written if self.rounded else 0.0
        return indices + self.converting(written, read) + errors

    @property
    def selection(self) -> float:
        """Seconds for the selection: one pass over the bucket, and the exact ranking of the candidates."""
        return self.compute.select * self.size + self.compute.cut * self.k

    def union(self, ranks: int) -> float:
        """Return the expected number of distinct positions that ``ranks`` ranks select: n (1 - (1 - k/n)^ranks).

        This assumes independent selections. Those of real gradients overlap more, so their union is smaller.
        """
        density = self.k / self.size
        return self.size * -math.expm1(ranks * math.log1p(-density)) if density < 1 else self.size


def _cost(
    algorithm: str, problem: Problem, selection: float, steps: Sequence[Messages], merging: float, rounds: int
) -> Cost:
    bandwidth, latency = sum(step.bandwidth for step in steps), sum(step.latency for step in steps)
    latency += problem.compute.wait * rounds
    # With several nodes, the last step uses the link between nodes.
    nbytes = sum(step.nbytes for step in steps if step.link == steps[-1].link)
    return Cost(algorithm, selection, bandwidth, latency, merging, nbytes, rounds)


def _horovod(problem: Problem, network: Network) -> Cost:
    """Return the cost of Horovod's dense allreduce: 2 n (P-1)/P words, which leave each node once.

    Conversions to 16 bits are left out, which favours Horovod.
    """
    steps = network.allreduce(problem.size * problem.wire)
    merging = problem.compute.reduce * problem.size * network.others
    return _cost("horovod", problem, 0.0, steps, merging, rounds=2)


def _dense(problem: Problem, network: Network) -> Cost:
    """Return the cost of this package's dense allreduce: 2 n (P-1)/P words, no selection; merging is the summation."""
    return _sum("dense", problem, network, problem.itemsize)


def _rounded(problem: Problem, network: Network) -> Cost:
    """Return the cost of a dense allreduce of rounded values: 2 n (P-1)/P of them, and of the sums, rounded again."""
    cost = _sum("rounded", problem, network, problem.wire)
    size, ranks = problem.size, network.ranks
    coding = problem.converting(size + size / ranks, size * network.others + size)
    return replace(cost, selection=_PASSES * cost.selection, merging=cost.merging + coding)


def _sum(algorithm: str, problem: Problem, network: Network, width: float) -> Cost:
    """Return the cost of a sum of the bucket with values of ``width`` bytes."""
    steps = network.sum(problem.size * width)
    merging = problem.compute.reduce * problem.size * network.others
    return _cost(algorithm, problem, problem.compute.accumulate * problem.size, steps, merging, len(steps))


def _shared(problem: Problem, network: Network) -> Cost:
    """Return the cost of shared indices: 2 k (P-1)/P words, a dense allreduce of k values without selection."""
    steps = network.sum(problem.k * problem.wire)
    merging = problem.compute.reduce * problem.k * network.others + problem.converting(problem.k, 2 * problem.k)
    return _cost("shared", problem, problem.compute.accumulate * problem.size, steps, merging, len(steps))


def _topka(problem: Problem, network: Network) -> Cost:
    """Return the cost of TopkA: 2 k (P-1) words; every rank merges all entries."""
    entries = problem.k * network.ranks
    steps = network.allgather(problem.entry * entries)  # in slots: lengths travel with the entries
    merging = problem.compute.merge * entries + problem.coding(problem.k, entries)
    return _cost("topka", problem, problem.selection, steps, merging, rounds=1)


def _topkdsa(problem: Problem, network: Network) -> Cost:
    """Return the cost of TopkDSA: 2 k (P-1)/P words to the owners, then an allgather of their sums.

    The gathered sums have the expected fill-in, and are dense if that is shorter. Entries are merged twice, first
    within a group and then across groups; joining the gathered parts takes a quarter of the time of merging.
    """
    union = problem.union(network.ranks)
    gathered = min(problem.entry_at(union) * union, problem.wire * problem.size)
    # In slots: lengths travel with the sums.
    steps = [*network.direct(problem.entry * problem.k), *network.allgather(gathered)]
    merging = problem.compute.merge * (2 * problem.k + union / 4)
    merging += problem.coding(problem.k + union / network.ranks, problem.k + union)
    rounds = _groups(network.ranks) + 1
    return _cost("topkdsa", problem, problem.selection, steps, merging, rounds)


def _gtopk(problem: Problem, network: Network) -> Cost:
    """Return the cost of gTop-k: 4 k log2 P words, k entries up and down each level of a tree.

    On the way up, each level merges two vectors and cuts the sum to k entries.
    """
    steps = 2 * network.tree(problem.entry * problem.k)
    each_level = 2 * problem.k * (problem.compute.merge + problem.compute.cut)
    coding = problem.coding(problem.k, problem.k * (network.levels + 1))
    merging = each_level * network.levels + coding
    return _cost("gtopk", problem, problem.selection, steps, merging, rounds=2 * network.levels)


def _oktopk(problem: Problem, network: Network, selected: float | None = None) -> Cost:
    """Return the cost of Ok-Topk: 4 k (P-1)/P words, 2 k to the owners and 2 k gathered.

    Every step is charged for an exact threshold, which is needed while magnitudes change; one that still holds saves
    its four sums of a histogram. Left out: balancing a skewed result (at most 2 k (P-1)/P more), outdated regions, and
    new regions. Entries are merged twice, as in TopkDSA. Comparing the sums with the threshold and finding the returned
    entries takes half of that time again; joining the gathered entries takes as long as merging them once.
    """
    entries = problem.k if selected is None else selected
    sums = problem.sums
    split, gathered = network.direct(problem.entry * entries), network.allgather(problem.entry_at(sums) * sums)
    steps = [*split, *(_HISTOGRAMS * network.counts(_HISTOGRAM_BYTES)), *network.counts(), *gathered]
    merging = problem.compute.merge * (3 * entries + sums)
    merging += problem.coding(entries + sums / network.ranks, entries + sums)
    if problem.keep is not None:
        merging += _OWNED * problem.compute.accumulate * problem.size / network.ranks
    rounds = _groups(network.ranks) + _HISTOGRAMS + 2
    return _cost("oktopk", problem, problem.selection, steps, merging, rounds)


def _groups(ranks: int) -> int:
    """Return the rounds in which a rank sends to all others, a few at a time."""
    return -(-(ranks - 1) // _THROTTLE)


def _hierarchical(problem: Problem, network: Network) -> Cost:
    """Return the cost of TopkA on each node, Ok-Topk of the unions across nodes, and a broadcast on each node."""
    if not network.node:
        return replace(_topka(problem, network), algorithm="hierarchical")
    inside = Network(network.node.ranks, network.node.link)
    leaders = Network(math.ceil(network.ranks / network.node.ranks), network.link)
    inner = _topka(problem, inside)
    outer = _oktopk(problem, leaders, selected=problem.union(inside.ranks))
    sums = problem.entry_at(problem.sums) * problem.sums
    broadcast = _cost("", problem, 0.0, inside.tree(sums), 0.0, rounds=inside.levels)
    parts = (inner, outer, broadcast)
    return replace(
        outer,
        algorithm="hierarchical",
        bandwidth=sum(part.bandwidth for part in parts),
        latency=sum(part.latency for part in parts),
        merging=sum(part.merging for part in parts),
        rounds=sum(part.rounds for part in parts),
    )


FORMULAS: dict[str, Callable[[Problem, Network], Cost]] = {
    "horovod": _horovod,
    "dense": _dense,
    "rounded": _rounded,
    "topka": _topka,
    "topkdsa": _topkdsa,
    "gtopk": _gtopk,
    "oktopk": _oktopk,
    "hierarchical": _hierarchical,
    "shared": _shared,
}
