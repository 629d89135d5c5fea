"""Union: all ranks' values at the positions that any rank has selected."""

from __future__ import annotations

import numpy as np
import pytest
from laws import Case, everywhere, make, own_vector, same_bits, sum_bytes, summed

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.law

HEADER = 24


def full_of(transport, size):
    """Return an accumulator with gradients at every position, and its content."""
    gradient = np.random.default_rng(transport.rank).integers(1, 99, size).astype(np.float32)
    return Accumulator(np.zeros(size, np.float32), [(0, gradient)]), gradient


@pytest.mark.parametrize("indices", ["plain", "coded"])
@pytest.mark.parametrize("pattern", ["random", "disjoint", "some empty"])
def test_every_rank_sends_its_values_at_the_union_of_positions(transport, pattern, indices):
    collective, case = make(transport, "union", indices=indices), Case(500, pattern)
    accumulator, gradient = full_of(transport, 500)
    vector = accumulator.take_at(own_vector(case, transport).entries[0], shared=False)
    extended = collective.extend(accumulator, vector, 50)
    total = collective.allreduce(extended, 50).total
    united = np.unique(np.concatenate(transport.allgather_object(vector.indices)))
    everything = summed(transport, gradient)
    assert everywhere(transport, np.array_equal(total.indices, united) and extended.shared and total.shared)
    assert everywhere(transport, np.array_equal(total.values, everything[united]))
    assert everywhere(transport, not accumulator.buffer[united].any())
    assert everywhere(
        transport, np.array_equal(accumulator.buffer + np.isin(np.arange(500), united) * gradient, gradient)
    )
    assert same_bits(transport, total.indices, total.values)


def test_held_positions_stay_and_are_sent_as_zeros(transport):
    """A parameter that is frozen on rank 0 only."""
    first = 50 if transport.rank == 0 else 0
    accumulator = Accumulator(np.full(100, 2, np.float32), [(first, np.ones(100 - first, np.float32))])
    vector = accumulator.take_at(np.arange(first, 100, 10, dtype=np.int32), shared=False)
    collective = make(transport, "union")
    total = collective.allreduce(collective.extend(accumulator, vector, 10), 10).total
    united = np.arange(50 if transport.size == 1 else 0, 100, 10)
    expected = 3 * (transport.size - (united < 50))
    assert everywhere(transport, np.array_equal(total.indices, united) and np.array_equal(total.values, expected))
    assert everywhere(transport, (accumulator.buffer[:first] == 2).all())


def test_shared_positions_are_not_sent(transport):
    collective, shared = make(transport, "union"), make(transport, "shared")
    vector = SparseVector(np.arange(0, 5000, 2, dtype=np.int32), np.ones(2500, np.float32), 5000, shared=True)
    accumulator, _ = full_of(transport, 5000)
    assert collective.extend(accumulator, vector, 2500) is vector
    for one in (collective, shared):
        one.allreduce(vector, 2500)
    assert everywhere(transport, collective.traffic == shared.traffic)


def test_bytes_per_position_and_per_value_of_the_union(transport):
    size, ranks = 3000 * transport.size, transport.size
    collective, counts = make(transport, "union", indices="plain"), []
    for _ in range(3):
        accumulator, _ = full_of(transport, size)
        vector = accumulator.take_at(np.arange(transport.rank, size, ranks, dtype=np.int32), shared=False)
        collective.allreduce(collective.extend(accumulator, vector, 3000), 3000)
        counts.append(collective.traffic.bytes_sent)
    expected = (ranks - 1) * (4 * 3000 + HEADER + 16) + sum_bytes(transport, 4 * size)
    assert everywhere(transport, abs(counts[2] - counts[1] - expected) <= 4)
