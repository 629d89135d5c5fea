"""TopkDSA: each region is sent sparse or dense, whichever is smaller."""

from __future__ import annotations

import numpy as np
import pytest
from laws import dense, everywhere, make

from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.law


def exchange(transport, chosen, size, **settings):
    collective = make(transport, "topkdsa", **settings)
    vector = SparseVector(chosen.astype(np.int32), np.ones(chosen.size, np.float32), size)
    return collective.allreduce(vector, chosen.size).total, collective.traffic


def test_a_total_can_have_dense_and_sparse_regions(transport):
    total, _ = exchange(transport, np.arange(600), 1200)
    ranks = transport.size
    assert everywhere(transport, ranks == 1 or total.indices is not None)
    assert everywhere(transport, np.array_equal(dense(total), np.repeat([ranks, 0], 600)))


@pytest.mark.parametrize(("wire", "share"), [(None, 1 / 2), ("float32", 1 / 2), ("bfloat16", 1 / 3)])
def test_a_region_becomes_dense_if_that_takes_fewer_bytes(transport, wire, share):
    size = 12_000
    for factor, full in ((0.95, False), (1.05, True)):
        chosen = np.linspace(0, size - 1, round(factor * share * size))
        total, _ = exchange(transport, chosen, size, wire=wire, indices="plain")
        assert everywhere(transport, (total.indices is None) == full and np.count_nonzero(dense(total)) == chosen.size)


@pytest.mark.parametrize(("k", "words"), [(1000, lambda k, n: 4 * k), (60_000, lambda k, n: 2 * k + n)])
def test_sends_between_4k_and_2k_plus_n_words(transport, k, words):
    size, ranks = 120_000, transport.size
    _, traffic = exchange(transport, np.linspace(0, size - 1, k), size, indices="plain")
    # Of the part for each other rank, and of this rank's part, whose length and form each other rank is told before.
    headers = (24 + 24 + 16) * (ranks - 1)
    most = 1.01 * (4 * words(k, size) * (ranks - 1) / ranks + headers) + 8 * ranks
    assert everywhere(transport, traffic.bytes_sent <= most)
