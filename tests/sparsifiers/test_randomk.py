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
from horovod_sparse.rules import BucketContext, Step
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
        vector = taken(
            made(RandomK, BucketContext(1000, LIKE, bucket, rank, 2), seed=seed, shared=shared), 1000, 20, number
        )
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


# --- a part of what was taken, as GraVAC sends it ---


@settings(max_examples=60)
@given(size=st.integers(1, 200), k=st.integers(1, 210), part=st.integers(0, 210), number=st.integers(0, 50))
def test_a_part_holds_so_many_of_the_entries_and_is_the_same_on_every_rank(size, k, part, number):
    parts = []
    for rank in range(2):
        sparsifier = made(RandomK, BucketContext(size, LIKE, rank=rank, ranks=2))
        values = np.arange(1, size + 1, dtype=np.float32) * (rank + 1)
        vector = take(sparsifier, values, k, number)[0]
        parts.append(sparsifier.narrow(vector, part, Step(number=number)))
        assert len(parts[-1]) == min(part, len(vector))
        assert np.array_equal(parts[-1].values, values[parts[-1].indices])
        assert np.isin(parts[-1].indices, vector.indices).all()
    assert np.array_equal(parts[0].indices, parts[1].indices)
    assert all(one.shared for one in parts)


def test_every_part_is_equally_likely_whatever_the_magnitudes():
    sparsifier, draws = made(RandomK, 6), 3000
    values = 10.0 ** np.arange(6, dtype=np.float32)
    seen = Counter()
    for number in range(draws):
        vector = take(sparsifier, values, 4, number)[0]
        seen[tuple(sparsifier.narrow(vector, 2, Step(number=number)).indices.tolist())] += 1
    subsets = list(itertools.combinations(range(6), 2))
    expected = draws / len(subsets)
    chi_square = sum((seen[subset] - expected) ** 2 / expected for subset in subsets)
    assert chi_square < 14 + 4 * 28**0.5


def test_ranks_that_draw_their_own_positions_draw_their_own_parts():
    def part(rank):
        sparsifier = made(RandomK, BucketContext(1000, LIKE, rank=rank, ranks=2), shared=False)
        # Of vectors at the same positions, to see that the second draw differs.
        vector = take(made(RandomK, 1000), np.ones(1000, np.float32), 100)[0]
        return set(sparsifier.narrow(vector, 20, Step()).indices.tolist())

    assert part(0) != part(1)
