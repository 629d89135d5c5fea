"""Hierarchical: the ranks of a node first, then one rank of each node across the network."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.exchange import Exchange, Traffic
from horovod_sparse.collectives.messenger import Messenger
from horovod_sparse.collectives.nodes import split_by_node
from horovod_sparse.vector import SparseVector

_BASIC = ("topka", "topkdsa", "gtopk", "oktopk", "dense")


class Hierarchical(Base):
    """An inner collective on each node, an outer one among the nodes' first ranks, and a broadcast in the node.

    What crosses the network counts nodes instead of ranks. What the outer collective returns stays with the first
    rank of the node. On one node only the inner collective runs.

    Args:
        comm: The communicator of the ranks that take part.
        inner: Name of the collective on a node.
        outer: Name of the collective across nodes.
        node_ranks: So many consecutive ranks count as one node; None: those that share memory.
        wire: Format in which values travel, in nodes and between them; None: as they are.
        **options: Options of the two collectives.

    Raises:
        ValueError: A name is unknown or no collective that can be combined, node_ranks is below 1, the format is
            unknown, or dense steps at the start are asked for.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        inner: str = "topka",
        outer: str = "oktopk",
        node_ranks: int | None = None,
        wire: str | None = None,
        **options: Any,
    ) -> None:
        from horovod_sparse.collectives import make  # whose table holds this class, too

        super().__init__(comm)
        for name in (inner, outer):
            if name not in _BASIC:
                raise ValueError(f"hierarchical combines two of {', '.join(_BASIC)}, but not {name!r}")
        if options.get("dense_steps"):
            raise ValueError("hierarchical has no dense_steps: a node does not know the outer one's step")
        options["wire"] = wire
        nodes = split_by_node(comm, node_ranks)
        self._nodes = nodes.nodes
        self._node = Messenger(nodes.mine, wire)
        self._always_dense = inner == "dense"
        self._inner = make(inner, nodes.mine, options)
        self._outer = None if nodes.leaders is None else make(outer, nodes.leaders, options)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received, inside its node and across nodes."""
        total = Traffic()
        for part in (self._messenger, self._node, self._inner, self._outer):
            if part is not None:
                total.add(part.traffic)
        return total

    def _allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the vectors of each node, then the nodes' sums."""
        of_node = self._inner.allreduce(vector, k)
        if self._nodes == 1:
            return of_node
        if self._outer is None:
            return Exchange(self._broadcast(None, vector), of_node.returned)
        node_total = of_node.total
        if node_total.indices is None and not self._always_dense:
            # Other nodes' totals may have indices, and a collective takes either kind, but not both at once.
            everything = np.arange(vector.size, dtype=np.int32, like=vector.values)
            node_total = SparseVector(everything, node_total.values, vector.size, shared=True)
        across = self._outer.allreduce(node_total, k)
        total, error = self._node.wire.round(across.total)
        if self._messenger.rank > 0:  # the first ranks round alike, and one of them answers for it
            error = vector.nothing()
        return Exchange(self._broadcast(total, vector), of_node.returned.plus(across.returned, error))

    def _broadcast(self, total: SparseVector | None, like: SparseVector) -> SparseVector:
        """Tells the node the total that its first rank has; a total without indices travels as its values."""
        message, wire = np.empty(0, np.uint8, like=like.values), self._node.wire
        if total is not None:
            message = total.values.view(np.uint8) if total.indices is None else wire.pack(total.entries)
        headers = self._node.share(message.nbytes, total is not None and total.indices is None)
        length, full = headers[0].tolist()
        message = self._node.broadcast(message, length)
        if full:
            return SparseVector.full(message.view(like.values.dtype))
        return SparseVector(*wire.unpack(message, like.values.dtype), like.size, shared=True)

    def state_dict(self) -> dict[str, Any]:
        """The states of both collectives; the outer one's is empty on ranks that do not take part in it."""
        return {"inner": self._inner.state_dict(), "outer": {} if self._outer is None else self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` on the same rank of the same nodes."""
        self._inner.load_state_dict(state["inner"])
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
