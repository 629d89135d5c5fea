"""StableTopK: the best blocks of all ranks, kept for many steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.compression import Sparse
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import StableTopK

LIKE = np.zeros(0, np.float32)


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


def take(sparsifier, gradient, k, consensus=lambda array: array):
    accumulator = Accumulator(np.zeros_like(gradient), [(0, gradient)])
    return sparsifier.take(accumulator, k, consensus).indices.tolist()


@given(size=st.integers(1, 300), block=st.integers(1, 40), k=st.integers(1, 300), seed=st.integers(0, 99))
def test_the_best_blocks_of_all_ranks_together_are_chosen(size, block, k, seed):
    block, k = min(block, size), min(k, size)
    mine, other = whole_numbers(seed, size), whole_numbers(seed + 100, size)
    taken = take(StableTopK(Place(size, LIKE), block=block), mine, k, lambda array: array + scores(other, block))
    count = max(1, k // block) if k < size else size
    assert taken == best(scores(mine, block) + scores(other, block), count, block, size)


@given(cuts=st.lists(st.integers(0, 90), max_size=8), block=st.integers(1, 40), seed=st.integers(0, 99))
def test_held_positions_count_nothing(cuts, block, seed):
    cuts = sorted(cuts)
    parts = list(zip(cuts[::2], cuts[1::2], strict=False))
    gradient, acc = whole_numbers(seed, 90), np.zeros(90, np.float32)
    for start, stop in parts:
        acc[start:stop] = gradient[start:stop] + 5
    accumulator = Accumulator(np.full(90, 5, np.float32), [(start, gradient[start:stop]) for start, stop in parts])
    seen = []
    StableTopK(Place(90, LIKE), block=block).take(accumulator, 45, lambda array: seen.append(array) or array)
    assert np.array_equal(seen[0], scores(acc, block))


def test_between_two_choices_nothing_is_chosen_or_agreed_upon():
    sparsifier, agreed = StableTopK(Place(200, LIKE), block=8, refresh=3), []
    taken = []
    for step in range(7):
        gradient = whole_numbers(step, 200)
        taken.append(take(sparsifier, gradient, 40, lambda array, step=step: agreed.append(step) or array))
        assert taken[-1] == best(scores(whole_numbers(step - step % 3, 200), 8), 5, 8, 200)
    assert agreed == [0, 3, 6]


def test_another_density_is_a_new_choice_unless_it_is_as_many_blocks():
    sparsifier, agreed = StableTopK(Place(200, LIKE), block=8, refresh=100), []
    for step, k in enumerate([40, 41, 47, 48, 16, 3, 8]):
        gradient = whole_numbers(step, 200)
        taken = take(sparsifier, gradient, k, lambda array, step=step: agreed.append(step) or array)
        assert len(taken) == max(1, k // 8) * 8
    assert agreed == [0, 3, 4, 5]


def test_scores_of_large_and_small_gradients_neither_overflow_nor_vanish():
    for magnitude in (1e30, 1e-30):
        gradient = np.zeros(64, np.float32)
        gradient[40:48] = magnitude
        assert take(StableTopK(Place(64, LIKE), block=8), gradient, 8) == list(range(40, 48))


def test_a_choice_needs_no_array_of_the_buckets_size():
    import tracemalloc

    size = 1_000_000
    accumulator = Accumulator(np.ones(size, np.float32), [(0, np.ones(size, np.float32))])
    accumulator.settle()
    tracemalloc.start()
    try:
        StableTopK(Place(size, LIKE)).take(accumulator, size // 100, lambda array: array)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size


def test_a_block_larger_than_the_bucket_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"but is 64 for bucket 3 of 63 elements: .*smaller block.*larger dense_below"):
        StableTopK(Place(63, LIKE, bucket=3))
    assert Sparse(0.01, sparsifier="stable").sparsifier == "stable"  # before any bucket is there


@pytest.mark.parametrize("option", ["block", "refresh"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_bad_options_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must be a whole number of at least 1, not {value}"):
        StableTopK(Place(100, LIKE), **{option: value})
