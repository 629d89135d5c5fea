"""The ranks of a communicator by node."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from mpi4py import MPI


class Nodes(NamedTuple):
    """How a communicator divides into nodes.

    Attributes:
        nodes: The number of nodes.
        mine: The ranks of this rank's node.
        leaders: The first rank of every node; None on all others.
    """

    nodes: int
    mine: MPI.Intracomm
    leaders: MPI.Intracomm | None


@functools.cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval()


def split_by_node(comm: MPI.Intracomm, node_ranks: int | None) -> Nodes:
    """Divides a communicator; done once for each, as communicators are few.

    Args:
        comm: The communicator; all its ranks call this.
        node_ranks: So many consecutive ranks count as one node; None: those that share memory.

    Raises:
        ValueError: node_ranks is below 1.
    """
    if node_ranks is not None and node_ranks < 1:
        raise ValueError(f"node_ranks must be at least 1, not {node_ranks}")
    known: Any = comm.Get_attr(_keyval()) or {}
    if node_ranks not in known:
        mine = _node(comm, node_ranks)
        first = mine.Get_rank() == 0
        leaders: Any = comm.Split(0 if first else MPI.UNDEFINED)
        known[node_ranks] = Nodes(comm.allreduce(int(first)), mine, leaders if first else None)
        comm.Set_attr(_keyval(), known)
    nodes: Nodes = known[node_ranks]
    return nodes


def _node(comm: MPI.Intracomm, node_ranks: int | None) -> Any:
    return comm.Split_type(MPI.COMM_TYPE_SHARED) if node_ranks is None else comm.Split(comm.Get_rank() // node_ranks)
