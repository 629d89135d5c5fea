"""Dense: one MPI Allreduce of the whole bucket."""

from __future__ import annotations

import numpy as np
import pytest
from laws import Case, check_exchange, everywhere, make

from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]


def test_asks_for_everything_and_sends_as_many_bytes_as_a_ring(comm):
    collective, ranks = make(comm, "dense"), comm.Get_size()
    assert collective.decide(1200, 10)
    collective.allreduce(SparseVector.full(np.ones(1200, np.float32)), 1200)
    expected = round(2 * 4800 * (ranks - 1) / ranks)
    assert everywhere(comm, collective.traffic.bytes_sent == collective.traffic.bytes_received == expected)


def test_the_total_of_sparse_vectors_holds_every_position(comm):
    assert check_exchange(comm, make(comm, "dense"), Case(100, "random")).total.indices is None
