"""RandomK: any k positions, each set of them as likely as any other."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import RandomK

LIKE = np.zeros(0, np.float32)


def take(sparsifier, size, k):
    gradient = np.arange(1, size + 1, dtype=np.float32)
    return sparsifier.take(Accumulator(np.zeros_like(gradient), [(0, gradient)]), k, lambda array: array)


@given(size=st.integers(1, 400), k=st.integers(1, 450), seed=st.integers(0, 50))
def test_k_different_positions_leave(size, k, seed):
    vector = take(RandomK(Place(size, LIKE), seed=seed), size, k)
    assert len(vector) == min(k, size)
    assert (np.diff(vector.indices) > 0).all()
    assert np.array_equal(vector.values, vector.indices + 1)


@pytest.mark.parametrize(("size", "k"), [(5, 1), (5, 2), (6, 3), (5, 3), (7, 6)])
def test_every_subset_is_equally_likely(size, k):
    sparsifier, draws = RandomK(Place(size, LIKE)), 3000
    seen = Counter(tuple(take(sparsifier, size, k).indices.tolist()) for _ in range(draws))
    subsets = list(itertools.combinations(range(size), k))
    expected = draws / len(subsets)
    chi_square = sum((seen[subset] - expected) ** 2 / expected for subset in subsets)
    freedom = len(subsets) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four deviations above the mean of the distribution


def test_ranks_that_share_draw_the_same_in_every_step_and_bucket_another():
    ranks = [RandomK(Place(1000, LIKE, bucket=1, rank=rank), seed=3) for rank in range(2)]
    seen = []
    for _ in range(5):
        one, other = (take(rank, 1000, 20) for rank in ranks)
        assert one.shared
        assert np.array_equal(one.indices, other.indices)
        seen.append(one.indices.tolist())
    seen.append(take(RandomK(Place(1000, LIKE, bucket=2), seed=3), 1000, 20).indices.tolist())
    seen.append(take(RandomK(Place(1000, LIKE, bucket=1), seed=4), 1000, 20).indices.tolist())
    assert len(set(map(tuple, seen))) == 7


def test_ranks_that_do_not_share_draw_their_own():
    vectors = [take(RandomK(Place(1000, LIKE, rank=rank), shared=False), 1000, 20) for rank in range(3)]
    assert not any(vector.shared for vector in vectors)
    assert len({tuple(vector.indices.tolist()) for vector in vectors}) == 3
    assert not RandomK(Place(1000, LIKE), shared=False).shares_indices


def test_memory_depends_on_k_and_not_on_the_size():
    size, k = 4_000_000, 4000
    accumulator = Accumulator(np.zeros(size, np.float32), [(0, np.zeros(size, np.float32))])
    accumulator.settle()
    tracemalloc.start()
    try:
        RandomK(Place(size, LIKE)).take(accumulator, k, lambda array: array)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * k


def test_held_positions_stay_in_the_memory():
    buffer = np.full(10, 3, np.float32)
    accumulator = Accumulator(buffer, [(0, np.ones(4, np.float32)), (7, np.ones(3, np.float32))])
    vector = RandomK(Place(10, LIKE)).take(accumulator, 10, lambda array: array)
    assert buffer.tolist() == [0, 0, 0, 0, 3, 3, 3, 0, 0, 0]
    assert vector.values.tolist() == [4, 4, 4, 4, 0, 0, 0, 4, 4, 4]
