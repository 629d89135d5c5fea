"""Hierarchical: nodes first, then across nodes."""

from __future__ import annotations

import numpy as np
import pytest
from laws import Case, check_exchange, dense, everywhere, own_vector

from horovod_sparse.collectives import Hierarchical, TopkA
from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]


def test_one_node_runs_the_inner_collective_alone(comm):
    case = Case(1000, "random", seed=4)
    vector = own_vector(case, comm)
    collective = Hierarchical(comm, inner="topka", outer="oktopk", node_ranks=comm.Get_size())
    total = collective.allreduce(vector, 10).total
    assert everywhere(comm, np.array_equal(dense(total), dense(TopkA(comm).allreduce(vector, 10).total)))


def test_ranks_that_share_memory_are_one_node(comm):
    exchange = check_exchange(comm, Hierarchical(comm, inner="gtopk"), Case(1000, "random", seed=4, share=0.01))
    assert len(exchange.total) <= 10


def test_what_the_nodes_drop_stays_with_their_first_ranks(comm):
    collective = Hierarchical(comm, inner="topka", outer="gtopk", node_ranks=2)
    exchange = check_exchange(comm, collective, Case(1000, "disjoint", seed=4, share=0.01))
    if comm.Get_rank() % 2:
        assert len(exchange.returned) == 0


def test_only_first_ranks_send_across_nodes(comm):
    collective = Hierarchical(comm, inner="topka", outer="topka", node_ranks=2)
    check_exchange(comm, collective, Case(1000, "everything", seed=4))
    assert (collective._outer is None) == (comm.Get_rank() % 2 == 1)
    last_alone = comm.Get_size() % 2 == 1 and comm.Get_rank() == comm.Get_size() - 1
    assert (collective._inner.traffic.bytes_sent == 0) == (last_alone or comm.Get_size() == 1)


def test_a_node_whose_total_became_dense_meets_one_whose_total_is_sparse(comm):
    """TopkDSA gives up indices where they do not pay: here on the first node only."""
    size = 1000
    indices = np.arange(size if comm.Get_rank() < 2 else 3, dtype=np.int32)
    vector = SparseVector(indices, np.ones(indices.size, np.float32), size)
    collective = Hierarchical(comm, inner="topkdsa", outer="topka", node_ranks=2)
    total = dense(collective.allreduce(vector, 10).total)
    ranks = comm.Get_size()
    assert everywhere(comm, np.array_equal(total, np.where(np.arange(size) < 3, ranks, min(ranks, 2))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": "hierarchical"}, "combines two of topka, .*not 'hierarchical'"),
        ({"outer": "ring"}, "not 'ring'"),
        ({"dense_steps": 5}, "hierarchical has no dense_steps"),
        ({"node_ranks": 0}, "node_ranks must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_combined_is_refused(comm, options, message):
    with pytest.raises(ValueError, match=message):
        Hierarchical(comm, **options)
