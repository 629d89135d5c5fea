"""SparDL: blocks are summed in log P hops, and cut to k/P entries in each."""

from __future__ import annotations

import numpy as np
import pytest
from laws import Case, check_exchange, everywhere, make, own_vector
from reference_step import cut_hops

from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.law


@pytest.mark.parametrize("pattern", ["random", "disjoint", "one region", "some empty", "same indices"])
@pytest.mark.parametrize(("size", "share"), [(2000, 0.02), (50, 0.1), (3, 0.4)])
def test_totals_and_what_returns_are_those_of_the_reference(transport, pattern, size, share):
    case = Case(size, pattern, seed=2, share=share)
    reduced = check_exchange(transport, make(transport, "spardl"), case)
    mine = np.zeros(size, np.float32)
    vector = own_vector(case, transport)
    mine[vector.indices] = vector.values
    total, returned = cut_hops(np.array(transport.allgather_object(mine)), case.k)
    found, back = np.zeros((2, size), np.float32)
    found[reduced.total.indices], back[reduced.returned.indices] = reduced.total.values, reduced.returned.values
    assert everywhere(transport, np.array_equal(found, total))
    assert everywhere(transport, np.array_equal(back, returned[transport.rank]))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_volume_and_the_rounds_do_not_depend_on_what_the_ranks_select(transport, overlap):
    ranks, k = transport.size, 3000 * transport.size
    size = k * (1 if overlap else ranks)
    mine = np.arange(0 if overlap else transport.rank, size, 1 if overlap else ranks, dtype=np.int32)
    collective, sent = make(transport, "spardl", indices="plain"), []
    for _ in range(3):
        collective.allreduce(SparseVector(mine, np.ones(mine.size, np.float32), size), k)
        sent.append((collective.traffic.bytes_sent, collective.traffic.rounds))
    (before, rounds), (after, last) = sent[1:]
    hops, expected = (ranks - 1).bit_length(), 2 * 8 * k * (ranks - 1) / ranks
    assert everywhere(transport, abs(after - before - expected) <= 64 * ranks + 8 * ranks * hops)
    assert everywhere(transport, last - rounds == hops + (ranks > 1))
