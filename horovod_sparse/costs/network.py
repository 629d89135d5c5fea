"""Costs of patterns of messages on a network: those that the collectives consist of.

Units: seconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.transport.traffic import RING_BYTES


@dataclass(frozen=True)
class Link:
    """A connection of two ranks.

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte, in one direction while as much travels in the other.
    """

    alpha: float
    beta: float


@dataclass(frozen=True)
class Node:
    """A machine with several ranks, as one with several GPUs; they are neighbours in rank.

    Attributes:
        ranks: How many; all of them share the one link to the other nodes.
        link: What connects two ranks inside a node.
    """

    ranks: int
    link: Link


@dataclass(frozen=True)
class Messages:
    """Messages that a rank sends one after the other.

    Attributes:
        nbytes: Bytes of all of them.
        messages: Their number.
        link: The link that they cross.
    """

    nbytes: float
    messages: float
    link: Link

    @property
    def bandwidth(self) -> float:
        """Seconds for the bytes."""
        return self.nbytes * self.link.beta

    @property
    def latency(self) -> float:
        """Seconds for the messages."""
        return self.messages * self.link.alpha


class Network:
    """P ranks and what lies between them. Each method gives the steps of one pattern, as the slowest rank does them.

    Args:
        ranks: Number of ranks P.
        link: Between two ranks, or between two nodes.
        node: How the ranks share machines; None: one rank on each. Where all ranks fit on one, ``link`` is unused.
    """

    def __init__(self, ranks: int, link: Link, node: Node | None = None) -> None:
        self.ranks = ranks
        self.link = node.link if node and ranks <= node.ranks else link
        self.node = node if node and 1 < node.ranks < ranks else None
        self.others = (ranks - 1) / ranks  # the part of a vector that other ranks own
        self.levels = (ranks - 1).bit_length()  # ceil(log2 P)

    def counts(self) -> list[Messages]:
        """An allgather of a number."""
        return [Messages(8 * (self.ranks - 1), self.levels, self.link)]

    def allgather(self, nbytes: float) -> list[Messages]:
        """An allgather of ``nbytes`` on all ranks together: a ring, which crosses from node to node once."""
        messages = self.ranks - 1 if nbytes >= RING_BYTES else self.levels
        return [Messages(nbytes * self.others, messages, self.link)]

    def allreduce(self, nbytes: float) -> list[Messages]:
        """A dense allreduce of ``nbytes``: the bytes of a ring in the messages of halving and doubling."""
        return [Messages(2 * nbytes * self.others, 2 * self.levels, self.link)]

    def direct(self, nbytes: float) -> list[Messages]:
        """Every rank sends each other one its region of ``nbytes``; ranks of a node do so over the same link."""
        senders = self.node.ranks * (self.ranks - self.node.ranks) / (self.ranks - 1) if self.node else 1.0
        return [Messages(nbytes * self.others * senders, self.ranks - 1, self.link)]

    def tree(self, nbytes: float) -> list[Messages]:
        """``nbytes`` up or down a binomial tree, whose lowest levels stay inside the nodes."""
        inner = min(self.levels, (self.node.ranks - 1).bit_length()) if self.node else 0
        steps = [] if self.node is None else [Messages(nbytes * inner, inner, self.node.link)]
        return [*steps, Messages(nbytes * (self.levels - inner), self.levels - inner, self.link)]
