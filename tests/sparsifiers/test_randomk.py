"""RandomK: any k positions, each set of them as likely as any other."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import LIKE, made, take

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Place, Step
from horovod_sparse.sparsifiers import RandomK


def taken(sparsifier, size, k, number=0):
    return take(sparsifier, np.ones(size, np.float32), k, number)[0]


@settings(max_examples=60)
@given(size=st.integers(1, 400), k=st.integers(1, 450), number=st.integers(0, 50))
def test_k_different_positions_leave(size, k, number):
    indices = taken(made(RandomK, size), size, k, number).indices
    assert len(indices) == min(k, size)
    assert (np.diff(indices) > 0).all()


@pytest.mark.parametrize(("size", "k"), [(5, 2), (6, 3), (7, 6)])
def test_every_subset_is_equally_likely(size, k):
    sparsifier, draws = made(RandomK, size), 2000
    seen = Counter(tuple(taken(sparsifier, size, k, number).indices.tolist()) for number in range(draws))
    subsets = list(itertools.combinations(range(size), k))
    expected = draws / len(subsets)
    chi_square = sum((seen[subset] - expected) ** 2 / expected for subset in subsets)
    freedom = len(subsets) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four deviations above the mean of the distribution


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_draw_the_same_or_their_own_and_steps_buckets_and_seeds_differ(shared):
    def draw(rank=0, number=0, bucket=1, seed=3):
        vector = taken(made(RandomK, Place(1000, LIKE, bucket, rank, 2), seed=seed, shared=shared), 1000, 20, number)
        assert vector.shared == shared
        return tuple(vector.indices.tolist())

    seen = [draw(rank, number) for rank in range(2) for number in range(5)]
    seen += [draw(bucket=2), draw(seed=4)]
    assert len(set(seen)) == (7 if shared else 12)


def test_memory_depends_on_k_and_not_on_the_size():
    size, k = 4_000_000, 4000
    accumulator = Accumulator(np.zeros(size, np.float32), [(0, np.zeros(size, np.float32))])
    accumulator.settle()
    tracemalloc.start()
    try:
        made(RandomK, size).take(accumulator, k, Step())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * k
