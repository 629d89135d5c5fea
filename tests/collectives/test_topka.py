"""TopkA: an allgather whose counts may differ by rank."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, make

from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.law


def test_entries_are_added_in_rank_order(transport):
    """Another order would round differently for these values."""
    mine = np.float32(2.0**24 if transport.rank == 0 else 1.0)
    vector = SparseVector(np.array([5], np.int32), np.array([mine]), 10)
    total = make(transport, "topka").allreduce(vector, 1).total
    assert everywhere(transport, total.values.tolist() == [2.0**24])


@pytest.mark.parametrize("count", [1000, 100_000])
def test_a_pair_costs_eight_bytes_on_the_wire(transport, count):
    collective = make(transport, "topka", indices="plain")
    others = transport.size - 1
    vector = SparseVector(np.arange(count, dtype=np.int32), np.ones(count, np.float32), 10 * count)
    for step in range(1, 4):
        collective.allreduce(vector, count)
        traffic, expected = collective.traffic, step * others * (8 * count + 24 + 16)  # 2 k (P-1) words, two headers
        assert everywhere(transport, abs(traffic.bytes_sent - expected) <= step and traffic.bytes_received == expected)
