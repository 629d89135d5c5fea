"""Nodes: groups of ranks that share memory, or count as if they did."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from horovod_sparse.transport.traffic import Traffic

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport

# Names of kept objects: whether all ranks are known to share memory; the nodes by which sums proceed, or None.
ONE_NODE, _FOR_SUMS = "one node", "nodes for sums"


class Nodes(NamedTuple):
    """Division of a transport's ranks into nodes.

    Attributes:
        firsts: First rank of each rank's node; the same list on all ranks.
        own: Transport of the ranks of this rank's node.
        peers: Transport of the ranks with this rank's number in their node; smaller nodes may have none.
    """

    firsts: list[int]
    own: Transport
    peers: Transport

    @property
    def number(self) -> int:
        """Number of nodes."""
        return len(set(self.firsts))

    @property
    def nested(self) -> bool:
        """True if there are several nodes, with the same number of ranks each, more than one."""
        return self.number > 1 and set(Counter(self.firsts).values()) == {self.own.size} != {1}

    @property
    def leaders(self) -> Transport | None:
        """Transport of the first ranks of all nodes; None on the other ranks."""
        return self.peers if self.own.rank == 0 else None

    def counting(self, traffic: Traffic | None = None) -> Nodes:
        """Return channels of both transports, which count their traffic in ``traffic``, or each for itself."""
        own, peers = self.own.channel(), self.peers.channel()
        if traffic is not None:
            own.traffic = peers.traffic = traffic
        return self._replace(own=own, peers=peers)


def nodes_of(transport: Transport, node_ranks: int | None) -> Nodes:
    """Return the nodes of a transport's ranks, as ``Transport.by_node``, with transports that all callers share."""

    def split() -> Nodes:
        nodes = transport.split(node_ranks)
        for part in (nodes.own, nodes.peers):
            part.keep(_FOR_SUMS, lambda: None)
        if node_ranks is None:
            nodes.own.keep(ONE_NODE, lambda: True)
            transport.keep(ONE_NODE, lambda: nodes.number == 1)
        return nodes

    return transport.keep(f"nodes of {node_ranks}", split)


def nested_nodes(transport: Transport) -> Nodes | None:
    """Return the nodes of ranks that share memory if they are ``nested``, else None; likewise shared."""

    def find() -> Nodes | None:
        nodes = nodes_of(transport, None)
        return nodes if nodes.nested else None

    return transport.keep(_FOR_SUMS, find)
