"""Hierarchical: one collective within nodes, another between them."""

from __future__ import annotations

import numpy as np
import pytest
from laws import Case, check_exchange, dense, everywhere, make, own_vector, summed

from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.law


def test_on_one_node_only_the_inner_collective_runs(transport):
    vector = own_vector(Case(1000, "random", seed=4), transport)
    collective = make(transport, "hierarchical", inner="topka", outer="oktopk", node_ranks=transport.size)
    total = collective.allreduce(vector, 10).total
    assert everywhere(
        transport, np.array_equal(dense(total), dense(make(transport, "topka").allreduce(vector, 10).total))
    )


def test_ranks_with_shared_memory_form_a_node(transport):
    reduced = check_exchange(
        transport, make(transport, "hierarchical", inner="gtopk"), Case(1000, "random", share=0.01)
    )
    assert len(reduced.total) <= 10


def test_entries_dropped_by_a_node_are_returned_to_its_first_rank(transport):
    collective = make(transport, "hierarchical", inner="topka", outer="gtopk", node_ranks=2)
    reduced = check_exchange(transport, collective, Case(1000, "disjoint", share=0.01))
    assert transport.rank % 2 == 0 or len(reduced.returned) == 0


@pytest.mark.parametrize("node_ranks", [1, 2])
def test_the_error_of_the_last_rounding_is_returned_to_the_first_rank(transport, node_ranks):
    """All first ranks round the same total; here its values are sums that bfloat16 does not hold."""
    collective = make(transport, "hierarchical", inner="gtopk", outer="topka", node_ranks=node_ranks, wire="bfloat16")
    vector = SparseVector(np.arange(50, dtype=np.int32), np.full(50, 256 if transport.rank else 1, np.float32), 50)
    reduced = collective.allreduce(vector, 50)
    came_back = dense(reduced.returned)
    assert everywhere(transport, not came_back.any() or transport.rank == 0)
    everything = 256 * (transport.size - 1) + 1
    assert everywhere(transport, bool((dense(reduced.total) + summed(transport, came_back) == everything).all()))


def test_only_first_ranks_send_across_nodes(transport):
    collective = make(transport, "hierarchical", inner="topka", outer="topka", node_ranks=2)
    vector = own_vector(Case(1000, "everything"), transport)
    collective.allreduce(vector, 1000)
    assert (collective._outer is None) == (transport.rank % 2 == 1)
    alone = make(transport.by_node(2).own, "topka")
    alone.allreduce(vector, 1000)
    assert collective.traffic.bytes_sent >= alone.traffic.bytes_sent
    assert transport.rank % 2 == 0 or collective.traffic.bytes_sent == alone.traffic.bytes_sent


def test_a_node_with_a_dense_total_is_summed_with_one_with_a_sparse_total(transport):
    """TopkDSA gives up indices where they do not pay: here on the first node only."""
    size = 1000
    indices = np.arange(size if transport.rank < 2 else 3, dtype=np.int32)
    vector = SparseVector(indices, np.ones(indices.size, np.float32), size)
    collective = make(transport, "hierarchical", inner="topkdsa", outer="topka", node_ranks=2)
    total = dense(collective.allreduce(vector, 10).total)
    ranks = transport.size
    assert everywhere(transport, np.array_equal(total, np.where(np.arange(size) < 3, ranks, min(ranks, 2))))
