"""split_by_node: which ranks share a node, and which of them speaks for it."""

from __future__ import annotations

import pytest
from laws import everywhere

from horovod_sparse.mpi.messenger import Messenger
from horovod_sparse.mpi.nodes import split_by_node

pytestmark = [pytest.mark.mpi, pytest.mark.law]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_consecutive_ranks_make_a_node_and_the_last_one_may_be_smaller(comm, size):
    nodes, rank, ranks = split_by_node(comm, size), comm.Get_rank(), comm.Get_size()
    assert everywhere(comm, nodes.nodes == -(-ranks // size))
    assert nodes.mine.Get_size() == min(size, ranks - rank // size * size)
    assert (nodes.leaders is not None) == (rank % size == 0)
    assert nodes.leaders is None or nodes.leaders.Get_size() == nodes.nodes
    number, mine, leaders = Messenger(comm).by_node(size)
    assert (number, mine.ranks, leaders is None) == (nodes.nodes, nodes.mine.Get_size(), nodes.leaders is None)


def test_this_machine_is_one_node(comm):
    assert everywhere(comm, split_by_node(comm, None).nodes == 1)


def test_a_communicator_is_divided_once(comm):
    assert split_by_node(comm, 2).mine is split_by_node(comm, 2).mine
