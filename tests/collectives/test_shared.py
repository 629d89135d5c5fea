"""SharedIndices: values alone travel."""

from __future__ import annotations

import numpy as np
import pytest
from laws import Case, check_exchange, everywhere, own_vector

from horovod_sparse.collectives import SharedIndices

pytestmark = [pytest.mark.mpi, pytest.mark.law]


def test_no_index_travels(comm):
    collective, ranks = SharedIndices(comm), comm.Get_size()
    exchange = check_exchange(comm, collective, Case(4000, "everything", seed=1))
    assert len(exchange.returned) == 0
    assert everywhere(comm, collective.traffic.bytes_sent == round(2 * 4 * 4000 * (ranks - 1) / ranks))


def test_vectors_whose_indices_differ_are_refused(comm):
    vector = own_vector(Case(100, "random", seed=1), comm)
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: .*use a sparsifier whose indices"):
        SharedIndices(comm).allreduce(vector, 10)
    assert np.isfinite(vector.values).all()
