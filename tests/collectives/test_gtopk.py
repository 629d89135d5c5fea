"""gTopk: the k largest survive a tree of merges, and what is dropped stays with the rank that dropped it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from laws import cases, check_exchange, dense, everywhere, examples

from horovod_sparse.collectives import GTopk
from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]


def sparse(indices, values, size=100):
    return SparseVector(np.array(indices, np.int32), np.array(values, np.float32), size)


@examples(30)
@given(case=cases)
def test_the_total_is_k_sparse(comm, case):
    assert len(check_exchange(comm, GTopk(comm), case).total) <= case.k


def test_the_largest_stay(comm):
    rank, ranks = comm.Get_rank(), comm.Get_size()
    vector = sparse([rank, 50], [rank + 1, 100])
    total = GTopk(comm).allreduce(vector, 2).total
    assert everywhere(comm, total.indices.tolist() == sorted([ranks - 1, 50]))
    assert everywhere(comm, total.values.max() == 100 * ranks)


def test_a_contribution_dropped_on_the_way_returns_although_its_index_survives(comm):
    """The last rank's entry at 7 survives; others' smaller ones at 7 are dropped by merges before they meet it."""
    ranks, last = comm.Get_size(), comm.Get_size() - 1
    mine = sparse([7], [64]) if comm.Get_rank() == last else sparse([7, 8, 9], [1, 8, 8])
    exchange = GTopk(comm).allreduce(mine, 2)
    came_back = comm.allreduce(dense(exchange.returned))
    handed_in = comm.allreduce(dense(mine))
    assert everywhere(comm, np.array_equal(dense(exchange.total) + came_back, handed_in))
    if ranks >= 3:
        assert everywhere(comm, came_back[7] > 0 and 7 in exchange.total.indices)


def test_no_gradient_mass_is_lost_on_random_floats(comm):
    generator = np.random.default_rng(comm.Get_rank())
    indices = np.sort(generator.permutation(2000)[:200]).astype(np.int32)
    mine = SparseVector(indices, generator.standard_normal(200).astype(np.float32), 2000)
    exchange = GTopk(comm).allreduce(mine, 200)
    handed_in = comm.allreduce(dense(mine).astype(np.float64))
    accounted = dense(exchange.total) + comm.allreduce(dense(exchange.returned).astype(np.float64))
    assert everywhere(comm, np.abs(handed_in - accounted).sum() < 1e-6 * np.abs(handed_in).sum())


def test_ties_go_to_the_lower_index(comm):
    total = GTopk(comm).allreduce(sparse([3, 5, 9], [1, -1, 1]), 2).total
    assert everywhere(comm, total.indices.tolist() == [3, 5])


def test_sends_4k_log_p_words_at_most(comm):
    k, ranks = 10_000, comm.Get_size()
    collective = GTopk(comm)
    collective.allreduce(sparse(np.arange(k), np.ones(k), 10 * k), k)
    levels = (ranks - 1).bit_length()
    traffic = collective.traffic
    assert everywhere(comm, traffic.bytes_sent + traffic.bytes_received <= 2 * 4 * 4 * k * levels)
    assert everywhere(comm, traffic.messages_sent + traffic.messages_received <= 2 * 2 * levels)
    assert comm.allreduce(traffic.bytes_sent) == 2 * (ranks - 1) * 8 * k
