"""split_by_node: which ranks share a node, and which of them speaks for it."""

from __future__ import annotations

import pytest
from laws import everywhere

from horovod_sparse.collectives.nodes import split_by_node

pytestmark = [pytest.mark.mpi, pytest.mark.law]


def test_consecutive_ranks_make_a_node(comm):
    nodes = split_by_node(comm, 2)
    rank, ranks = comm.Get_rank(), comm.Get_size()
    assert everywhere(comm, nodes.nodes == -(-ranks // 2))
    assert nodes.mine.Get_size() == min(2, ranks - rank // 2 * 2)
    assert (nodes.leaders is not None) == (rank % 2 == 0)
    assert nodes.leaders is None or nodes.leaders.Get_size() == nodes.nodes


def test_this_machine_is_one_node(comm):
    assert everywhere(comm, split_by_node(comm, None).nodes == 1)


def test_a_communicator_is_divided_once(comm):
    assert split_by_node(comm, 2).mine is split_by_node(comm, 2).mine


def test_no_ranks_on_a_node_are_refused(comm):
    with pytest.raises(ValueError, match="node_ranks must be at least 1, not -1"):
        split_by_node(comm, -1)
