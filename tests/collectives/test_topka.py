"""TopkA: an allgather whose counts may differ by rank."""

from __future__ import annotations

import numpy as np
import pytest
from laws import Case, check_exchange, everywhere

from horovod_sparse.collectives import TopkA
from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]


@pytest.mark.parametrize("pattern", ["random", "some empty", "everything"])
def test_returns_nothing_and_drops_nothing(comm, pattern):
    exchange = check_exchange(comm, TopkA(comm), Case(100, pattern, seed=3, share=1e-9))
    assert len(exchange.returned) == 0


@pytest.mark.parametrize("count", [1000, 100_000])
def test_a_pair_costs_eight_bytes_on_the_wire(comm, count):
    collective = TopkA(comm)
    others = comm.Get_size() - 1
    vector = SparseVector(np.arange(count, dtype=np.int32), np.ones(count, np.float32), 10 * count)
    collective.allreduce(vector, count)
    traffic, expected = collective.traffic, others * (8 * count + 8)  # 2 k (P-1) words, and 8 bytes for the length
    assert everywhere(comm, abs(traffic.bytes_sent - expected) <= 1 and traffic.bytes_received == expected)
