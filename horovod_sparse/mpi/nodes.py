"""The ranks of a communicator by node."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpi4py import MPI

from horovod_sparse.mpi.kept import kept


class Nodes(NamedTuple):
    """Nodes of a communicator.

    Attributes:
        nodes: Their number.
        mine: The ranks of this rank's node.
        leaders: The first rank of every node; None on all others.
    """

    nodes: int
    mine: MPI.Intracomm
    leaders: MPI.Intracomm | None


def split_by_node(comm: MPI.Intracomm, node_ranks: int | None) -> Nodes:
    """Divides a communicator; done once for each, as communicators are few.

    Args:
        comm: The communicator; all its ranks call this.
        node_ranks: So many consecutive ranks, at least 1, count as one node; None: those that share memory.
    """
    nodes: Nodes = kept(comm, f"nodes of {node_ranks}", lambda: _split(comm, node_ranks))
    return nodes


def _split(comm: MPI.Intracomm, node_ranks: int | None) -> Nodes:
    rank = comm.Get_rank()
    mine: Any = comm.Split_type(MPI.COMM_TYPE_SHARED) if node_ranks is None else comm.Split(rank // node_ranks)
    first = mine.Get_rank() == 0
    leaders: Any = comm.Split(0 if first else MPI.UNDEFINED)
    return Nodes(comm.allreduce(int(first)), mine, leaders if first else None)
