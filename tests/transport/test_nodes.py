"""Nodes of any number of ranks, and the sums of the ranks of a node: the same laws for every transport."""

from __future__ import annotations

import numpy as np
import pytest
from exchanges import every_way
from laws import check_counts, everywhere, on_nodes

from horovod_sparse.kernels import to_host

pytestmark = pytest.mark.law


@pytest.mark.parametrize("ranks", [1, 2, 3, None])
def test_consecutive_ranks_make_a_node_and_the_last_one_may_be_smaller(transport, ranks):
    """This machine is one node."""
    nodes, rank, size = transport.by_node(ranks), transport.rank, transport.size
    ranks = ranks or size
    first = rank - rank % ranks
    assert nodes.number == -(-size // ranks)
    assert nodes.own.allgather_object(rank) == list(range(first, min(first + ranks, size)))
    assert (nodes.leaders is not None) == (rank == first)
    if nodes.leaders is not None:
        assert nodes.leaders.allgather_object(rank) == list(range(0, size, ranks))
    assert nodes.own.members == [transport.members[other] for other in nodes.own.allgather_object(rank)]


@every_way
@pytest.mark.parametrize("node_ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [5, 65, 4097, 20_000])
def test_ranks_of_a_node_sum_before_nodes_do(transport, put, node_ranks, size):
    """Where all nodes have the same number of ranks, each sends to the others what a rank alone would send."""
    channel, ranks = on_nodes(transport, node_ranks).channel(), transport.size
    mine = np.random.default_rng(transport.rank).standard_normal(size).astype(np.float32)
    handed_in, into = put(mine), put(mine.copy())
    total = channel.allreduce(handed_in)
    channel.allreduce_in_place(into)
    everyones, divided = transport.allgather_object(mine), channel.nodes_for_sums() is not None
    assert divided == (node_ranks > 1 and ranks > node_ranks and ranks % node_ranks == 0)
    if divided and channel._in_regions(handed_in):
        everyones = [sum(everyones[first : first + node_ranks]) for first in range(0, ranks, node_ranks)]
    assert everywhere(transport, to_host(total).tobytes() == sum(everyones).tobytes() == to_host(into).tobytes())
    assert everywhere(transport, np.array_equal(to_host(handed_in), mine))
    check_counts(transport, channel.traffic)
