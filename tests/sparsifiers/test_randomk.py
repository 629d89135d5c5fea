"""RandomK: any k positions, each set of them as likely as any other."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import LIKE, made, take

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.sparsifiers import RandomK


def taken(sparsifier, size, k, number=0):
    return take(sparsifier, np.ones(size, np.float32), k, number)[0]


def assert_equally_likely(draw, size, k, draws):
    """The chi-square of the subsets of k positions is at most four deviations above the mean of its distribution."""
    seen = Counter(tuple(draw(number).indices.tolist()) for number in range(draws))
    subsets = list(itertools.combinations(range(size), k))
    expected, freedom = draws / len(subsets), len(subsets) - 1
    assert sum((seen[subset] - expected) ** 2 / expected for subset in subsets) < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(("size", "k"), [(5, 2), (6, 3), (7, 6)])
def test_every_subset_is_equally_likely(size, k):
    sparsifier = made(RandomK, size)
    assert_equally_likely(lambda number: taken(sparsifier, size, k, number), size, k, 2000)


@pytest.mark.parametrize("shared", [True, False])
def test_positions_depend_on_step_bucket_seed_and_on_the_rank_unless_shared(shared):
    def draw(rank=0, number=0, bucket=1, seed=3):
        vector = taken(
            made(RandomK, BucketContext(1000, LIKE, bucket, rank, 2), seed=seed, shared=shared), 1000, 20, number
        )
        assert vector.shared == shared
        return tuple(vector.indices.tolist())

    seen = [draw(rank, number) for rank in range(2) for number in range(5)]
    seen += [draw(bucket=2), draw(seed=4)]
    assert len(set(seen)) == (7 if shared else 12)


# --- a part of what was taken, as GraVAC sends it ---


@settings(max_examples=60)
@given(size=st.integers(1, 200), k=st.integers(1, 210), part=st.integers(0, 210), number=st.integers(0, 50))
def test_narrowing_keeps_k_entries_the_same_on_every_rank(size, k, part, number):
    parts = []
    for rank in range(2):
        sparsifier = made(RandomK, BucketContext(size, LIKE, rank=rank, ranks=2))
        values = np.arange(1, size + 1, dtype=np.float32) * (rank + 1)
        vector = take(sparsifier, values, k, number)[0]
        parts.append(sparsifier.narrow(vector, part, Step(number=number)))
        assert len(vector) == min(k, size)
        assert len(parts[-1]) == min(part, len(vector))
        assert np.array_equal(parts[-1].values, values[parts[-1].indices])
        assert np.isin(parts[-1].indices, vector.indices).all()
    assert np.array_equal(parts[0].indices, parts[1].indices)
    assert all(one.shared for one in parts)


def test_every_narrowed_subset_is_equally_likely_for_any_magnitudes():
    sparsifier = made(RandomK, 6)

    def draw(number):
        vector = take(sparsifier, 10.0 ** np.arange(6, dtype=np.float32), 4, number)[0]
        return sparsifier.narrow(vector, 2, Step(number=number))

    assert_equally_likely(draw, 6, 2, 3000)


def test_ranks_with_private_positions_narrow_independently():
    def part(rank):
        sparsifier = made(RandomK, BucketContext(1000, LIKE, rank=rank, ranks=2), shared=False)
        # Of vectors at the same positions, to see that the second draw differs.
        vector = take(made(RandomK, 1000), np.ones(1000, np.float32), 100)[0]
        return set(sparsifier.narrow(vector, 20, Step()).indices.tolist())

    assert part(0) != part(1)
