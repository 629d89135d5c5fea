"""Costs of the communication patterns that the collectives consist of, in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from horovod_sparse.transport.traffic import GATHERED_SUM_TOTAL, RING_BYTES


@dataclass(frozen=True)
class Link:
    """Link between two ranks.

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte in one direction, with the same traffic in the other direction.
        staging: Seconds per byte that a rank sends and receives, for copies between its device and host memory.
    """

    alpha: float
    beta: float
    staging: float = 0.0


@dataclass(frozen=True)
class Node:
    """Machine with several ranks, for example one per GPU; its ranks are consecutive.

    Attributes:
        ranks: Number of ranks per node; they share one link to the other nodes.
        link: Link between two ranks inside a node.
    """

    ranks: int
    link: Link


@dataclass(frozen=True)
class Messages:
    """Messages that a rank sends one after the other.

    Attributes:
        nbytes: Total bytes, of all ranks that share the link.
        messages: Number of messages.
        link: Link that the messages cross.
        senders: Number of ranks that share the link.
    """

    nbytes: float
    messages: float
    link: Link
    senders: float = 1.0

    @property
    def bandwidth(self) -> float:
        """Seconds for the bytes."""
        return self.nbytes * (self.link.beta + self.link.staging / self.senders)

    @property
    def latency(self) -> float:
        """Seconds for the messages."""
        return self.messages * self.link.alpha


class Network:
    """Network of P ranks. Each method returns the steps of one pattern on the slowest rank.

    Args:
        ranks: World size P.
        link: Link between two ranks or, with ``node``, between two nodes.
        node: Ranks per node and their link; None: one rank per node. If all ranks fit on one node, ``link`` is unused.
    """

    def __init__(self, ranks: int, link: Link, node: Node | None = None) -> None:
        self.ranks = ranks
        self.link = node.link if node and ranks <= node.ranks else link
        self.node = node if node and 1 < node.ranks < ranks else None
        self.others = (ranks - 1) / ranks  # fraction of a vector that other ranks own
        self.levels = (ranks - 1).bit_length()  # ceil(log2 P)

    def counts(self, nbytes: float = 8) -> list[Messages]:
        """Return the steps of summing ``nbytes`` of each rank: by gathering them if they are few, else by MPI."""
        gathers = nbytes * self.ranks <= GATHERED_SUM_TOTAL
        return [Messages(nbytes * (self.ranks if gathers else 2) * self.others, self.levels, self.link)]

    def allgather(self, nbytes: float) -> list[Messages]:
        """Return the steps of an allgather of ``nbytes`` in total: a ring, which leaves each node once."""
        messages = self.ranks - 1 if nbytes >= RING_BYTES else self.levels
        return [Messages(nbytes * self.others, messages, self.link)]

    def allreduce(self, nbytes: float) -> list[Messages]:
        """Return the steps of a dense allreduce of ``nbytes``: bytes of a ring, messages of halving and doubling."""
        return [Messages(2 * nbytes * self.others, 2 * self.levels, self.link)]

    def sum(self, nbytes: float) -> list[Messages]:
        """Return the steps of this package's dense sum: of regions, which are then gathered, or of short arrays.

        On nodes with equal numbers of ranks, these sum up first; steps between nodes come last.
        """
        if nbytes * self.ranks <= GATHERED_SUM_TOTAL:
            return [Messages(nbytes * (self.ranks - 1), self.levels, self.link)]
        if self.node and self.ranks % self.node.ranks == 0:
            within = Network(self.node.ranks, self.node.link)
            across = Network(self.ranks // self.node.ranks, self.link).sum(nbytes / self.node.ranks)
            sharing = self.node.ranks
            shared = [replace(step, nbytes=step.nbytes * sharing, senders=sharing) for step in across]
            return [*within.direct(nbytes), *within.allgather(nbytes), *shared]
        return [*self.direct(nbytes), *self.allgather(nbytes)]

    def direct(self, nbytes: float) -> list[Messages]:
        """Return the steps of sending every other rank its region of ``nbytes``; ranks of a node share its link."""
        senders = self.node.ranks * (self.ranks - self.node.ranks) / (self.ranks - 1) if self.node else 1.0
        return [Messages(nbytes * self.others * senders, self.ranks - 1, self.link, senders)]

    def tree(self, nbytes: float) -> list[Messages]:
        """Return the steps of ``nbytes`` up or down a binomial tree; its lowest levels stay inside the nodes."""
        inner = min(self.levels, (self.node.ranks - 1).bit_length()) if self.node else 0
        steps = [] if self.node is None else [Messages(nbytes * inner, inner, self.node.link)]
        return [*steps, Messages(nbytes * (self.levels - inner), self.levels - inner, self.link)]
