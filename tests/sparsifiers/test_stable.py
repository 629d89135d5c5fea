"""StableTopK: the best blocks of all ranks, kept for many steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import LIKE, made, take

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.config import Sparse
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.sparsifiers import StableTopK


def whole_numbers(seed, size):
    """Gradients whose squares and sums are exact, with ties."""
    return np.random.default_rng(seed).integers(-3, 4, size).astype(np.float32)


def scores(acc, block):
    """Sum of the squares of each block, one block at a time."""
    return np.array([np.sum(acc[start : start + block].astype(np.float64) ** 2) for start in range(0, len(acc), block)])


def best(total, count, block, size):
    """The positions of the blocks with the largest scores; ties: lower block."""
    blocks = np.sort(np.argsort(-total, kind="stable")[:count])
    return [position for number in blocks for position in range(number * block, min(size, (number + 1) * block))]


def agreeing(size, agreed, **options):
    """Return a consensus function that records the arrays to sum."""
    return made(StableTopK, BucketContext(size, LIKE, consensus=lambda array: agreed.append(array) or array), **options)


def taken(sparsifier, gradient, k, number=0):
    return take(sparsifier, gradient, k, number)[0].indices.tolist()


@settings(max_examples=60)
@given(size=st.integers(1, 300), block=st.integers(1, 40), k=st.integers(1, 300), seed=st.integers(0, 99))
def test_the_best_blocks_of_all_ranks_together_are_chosen(size, block, k, seed):
    block, k = min(block, size), min(k, size)
    mine, other = whole_numbers(seed, size), whole_numbers(seed + 100, size)
    context = BucketContext(size, LIKE, ranks=2, consensus=lambda array: array + scores(other, block))
    count = max(1, k // block) if k < size else size
    expected = best(scores(mine, block) + scores(other, block), count, block, size)
    assert taken(made(StableTopK, context, block=block), mine, k) == expected


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 90), max_size=8), block=st.integers(1, 40), seed=st.integers(0, 99))
def test_held_positions_do_not_count(cuts, block, seed):
    cuts = sorted(cuts)
    gradient, acc, seen = whole_numbers(seed, 90), np.zeros(90, np.float32), []
    parts = list(zip(cuts[::2], cuts[1::2], strict=False))
    for start, stop in parts:
        acc[start:stop] = gradient[start:stop] + 5
    accumulator = Accumulator(np.full(90, 5, np.float32), [(start, gradient[start:stop]) for start, stop in parts])
    agreeing(90, seen, block=block).take(accumulator, 45, Step())
    assert np.array_equal(seen[0], scores(acc, block))


def test_between_choices_no_scores_are_computed_or_exchanged():
    agreed, counts = [], []
    sparsifier = agreeing(200, agreed, block=8, refresh=3)
    for number in range(7):
        chosen = best(scores(whole_numbers(number - number % 3, 200), 8), 5, 8, 200)
        assert taken(sparsifier, whole_numbers(number, 200), 40, number) == chosen
        counts.append(len(agreed))
    assert counts == [1, 1, 1, 2, 2, 2, 3]


def test_another_density_chooses_again_unless_the_number_of_blocks_is_the_same():
    agreed, counts = [], []
    sparsifier = agreeing(200, agreed, block=8, refresh=100)
    for number, k in enumerate([40, 41, 47, 48, 16, 3, 8]):
        assert len(taken(sparsifier, whole_numbers(number, 200), k, number)) == max(1, k // 8) * 8
        counts.append(len(agreed))
    assert counts == [1, 1, 1, 2, 3, 4, 4]


def test_scores_of_large_and_small_gradients_neither_overflow_nor_vanish():
    for magnitude in (1e30, 1e-30):
        gradient = np.zeros(64, np.float32)
        gradient[40:48] = magnitude
        assert taken(made(StableTopK, 64, block=8), gradient, 8) == list(range(40, 48))


def test_a_block_larger_than_the_bucket_is_refused_with_the_remedy():
    sparse = Sparse.of(0.01, sparsifier="stable")  # before any bucket is there
    with pytest.raises(ValueError, match=r"but is 64 for bucket 3 of 63 elements: .*smaller block.*larger dense_below"):
        StableTopK(BucketContext(63, LIKE, bucket=3), sparse.sparsifier)
