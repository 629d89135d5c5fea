"""TopkA: an allgather whose counts may differ by rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Case, cases, check_exchange, check_repeatable, dense, everywhere, vectors

from horovod_sparse.collectives import TopkA, topka
from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]


@settings(max_examples=60)
@given(case=cases)
def test_nothing_is_lost_and_every_rank_holds_the_same_bits(comm, case):
    check_exchange(comm, TopkA(comm), case)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_works_where_ranks_outnumber_elements(comm, size):
    check_exchange(comm, TopkA(comm), Case(size, "everything", seed=1))


@settings(max_examples=5)
@given(seed=st.integers(0, 1000))
def test_sums_in_rank_order_whatever_arrives_first(comm, seed):
    check_repeatable(comm, TopkA(comm), seed)


def test_returns_nothing(comm):
    vector = vectors(Case(100, "random", seed=3), comm.Get_size())[comm.Get_rank()]
    assert len(TopkA(comm).allreduce(vector).returned) == 0


def test_a_vector_without_indices_is_summed_dense(comm):
    values = np.arange(10, dtype=np.float32) + comm.Get_rank()
    total = TopkA(comm).allreduce(SparseVector.full(values)).total
    ranks = comm.Get_size()
    assert total.indices is None
    assert everywhere(comm, np.array_equal(dense(total), np.arange(10) * ranks + ranks * (ranks - 1) / 2))


def test_indices_above_2_to_the_24_stay_exact(comm):
    size = 2**31 - 1
    indices = np.array([2**24 + 1 + comm.Get_rank(), size - 1], np.int32)
    total = TopkA(comm).allreduce(SparseVector(indices, np.ones(2, np.float32), size)).total
    expected = [*(2**24 + 1 + rank for rank in range(comm.Get_size())), size - 1]
    assert everywhere(comm, total.indices.tolist() == expected)


def test_a_pair_costs_eight_bytes_on_the_wire(comm):
    collective = TopkA(comm)
    k, others = 1000, comm.Get_size() - 1
    indices = np.arange(k, dtype=np.int32)
    collective.allreduce(SparseVector(indices, np.ones(k, np.float32), 10 * k))
    assert everywhere(comm, collective.traffic.bytes == others * (8 * k + 8))  # and 8 for the count


def test_more_bytes_than_mpi_counts_hold_are_refused_on_every_rank(comm, monkeypatch):
    monkeypatch.setattr(topka, "MPI_COUNT_MAX", 100)
    vector = SparseVector(np.arange(64, dtype=np.int32), np.ones(64, np.float32), 64)
    with pytest.raises(RuntimeError, match=rf"rank {comm.Get_rank()}: TopkA would gather \d+ bytes .* lower density"):
        TopkA(comm).allreduce(vector)
