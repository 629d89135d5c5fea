"""Dense: one MPI Allreduce of the whole bucket."""

from __future__ import annotations

import numpy as np
import pytest
from laws import Case, check_exchange, everywhere

from horovod_sparse.collectives import Dense
from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]


def test_sends_as_many_bytes_as_a_ring(comm):
    collective = Dense(comm)
    collective.allreduce(SparseVector.full(np.ones(1200, np.float32)), 1200)
    ranks = comm.Get_size()
    expected = round(2 * 4800 * (ranks - 1) / ranks)
    assert everywhere(comm, collective.traffic.bytes_sent == collective.traffic.bytes_received == expected)


def test_asks_for_everything(comm):
    assert Dense(comm).entries(1000, 10) == 1000


def test_the_total_of_sparse_vectors_holds_every_position(comm):
    assert check_exchange(comm, Dense(comm), Case(100, "random", seed=1)).total.indices is None
