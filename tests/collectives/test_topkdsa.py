"""TopkDSA: regions that travel sparse or dense, whichever is shorter."""

from __future__ import annotations

import numpy as np
import pytest
from laws import Case, check_exchange, everywhere

from horovod_sparse.collectives import TopkDSA
from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]


def exchange(comm, indices, size, **options):
    collective = TopkDSA(comm, **options)
    vector = SparseVector(indices.astype(np.int32), np.ones(indices.size, np.float32), size)
    return collective.allreduce(vector, indices.size).total, collective.traffic


@pytest.mark.parametrize("size", [1000, 1001, 64])
def test_a_remainder_of_n_by_p_is_neither_lost_nor_counted_twice(comm, size):
    check_exchange(comm, TopkDSA(comm), Case(size, "everything", seed=1))
    check_exchange(comm, TopkDSA(comm), Case(size, "disjoint", seed=1))


def test_nothing_is_returned(comm):
    assert len(check_exchange(comm, TopkDSA(comm), Case(500, "random", seed=2, share=1e-9)).returned) == 0


def test_sparse_regions_stay_sparse_and_full_ones_become_dense(comm):
    sparse, _ = exchange(comm, np.arange(0, 10_000, 100), 10_000)
    full, _ = exchange(comm, np.arange(10_000), 10_000)
    assert everywhere(comm, sparse.indices is not None and len(sparse) == 100)
    assert everywhere(comm, full.indices is None)


def test_a_total_can_have_dense_and_sparse_regions(comm):
    total, _ = exchange(comm, np.arange(600), 1200)
    ranks = comm.Get_size()
    assert everywhere(comm, ranks == 1 or total.indices is not None)
    values = np.zeros(1200)
    values[slice(None) if total.indices is None else total.indices] = total.values
    assert everywhere(comm, np.array_equal(values, np.repeat([ranks, 0], 600)))


@pytest.mark.parametrize(("wire", "share"), [(None, 1 / 2), ("float32", 1 / 2), ("bfloat16", 1 / 3)])
def test_a_region_becomes_dense_where_that_is_shorter_on_the_wire(comm, wire, share):
    size = 12_000
    for factor, dense in ((0.95, False), (1.05, True)):
        chosen = np.linspace(0, size - 1, round(factor * share * size))
        total, _ = exchange(comm, chosen, size, wire=wire)
        assert everywhere(comm, (total.indices is None) == dense)


@pytest.mark.parametrize(("k", "words"), [(1000, lambda k, n: 4 * k), (60_000, lambda k, n: 2 * k + n)])
def test_sends_between_4k_and_2k_plus_n_words(comm, k, words):
    size, ranks = 120_000, comm.Get_size()
    indices = np.linspace(0, size - 1, k).astype(np.int32)
    _, traffic = exchange(comm, indices, size)
    headers = 16 * (ranks - 1)
    assert everywhere(
        comm, traffic.bytes_sent <= 1.01 * (4 * words(k, size) * (ranks - 1) / ranks + headers) + 8 * ranks
    )


def test_no_throttle_is_refused(comm):
    with pytest.raises(ValueError, match="throttle must be at least 1, not 0"):
        TopkDSA(comm, throttle=0)
