"""Hierarchical: the ranks of a node first, then one rank of each node across the network."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.exchange import Exchange, Traffic
from horovod_sparse.collectives.messenger import Messenger, pack, unpack
from horovod_sparse.collectives.nodes import split_by_node
from horovod_sparse.kernels import kernels_for
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
        **options: Options of the two collectives.

    Raises:
        ValueError: A name is unknown or no collective that can be combined, node_ranks is below 1, or dense steps at
            the start are asked for.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        inner: str = "topka",
        outer: str = "oktopk",
        node_ranks: int | None = None,
        **options: Any,
    ) -> None:
        from horovod_sparse.collectives import make  # whose table holds this class, too

        super().__init__(comm)
        for name in (inner, outer):
            if name not in _BASIC:
                raise ValueError(f"hierarchical combines two of {', '.join(_BASIC)}, but not {name!r}")
        if options.get("dense_steps"):
            raise ValueError("hierarchical has no dense_steps: a node does not know the outer one's step")
        nodes = split_by_node(comm, node_ranks)
        self._nodes = nodes.nodes
        self._node = Messenger(nodes.mine)
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
        across = self._outer.allreduce(of_node.total, k)
        returned = [(one.indices, one.values) for one in (of_node.returned, across.returned)]
        indices, values = kernels_for(vector.values).merge_sum(returned, vector.size)
        return Exchange(self._broadcast(across.total, vector), SparseVector(indices, values, vector.size))

    def _broadcast(self, total: SparseVector | None, like: SparseVector) -> SparseVector:
        """Tells the node the total that its first rank has; a total without indices travels as its values."""
        message = np.empty(0, np.uint8)
        if total is not None:
            message = total.values.view(np.uint8) if total.indices is None else pack((total.indices, total.values))
        headers = self._node.share(message.nbytes, total is not None and total.indices is None)
        length, full = headers[0].tolist()
        message = self._node.broadcast(message, length)
        if full:
            return SparseVector.full(message.view(like.values.dtype))
        return SparseVector(*unpack(message, like.values.dtype), like.size, shared=True)

    def state_dict(self) -> dict[str, Any]:
        """The states of both collectives; the outer one's is empty on ranks that do not take part in it."""
        return {"inner": self._inner.state_dict(), "outer": {} if self._outer is None else self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` on the same rank of the same nodes."""
        self._inner.load_state_dict(state["inner"])
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
