"""RandomBlock: consecutive positions that every rank chooses alike."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import RandomBlock

PLACE = Place(100, np.zeros(0, np.float32))


def take(sparsifier, gradient, k, segments=None):
    accumulator = Accumulator(np.zeros_like(gradient), segments or [(0, gradient)])
    return sparsifier.take(accumulator, k, lambda array: array), accumulator.settle()


@given(size=st.integers(1, 60), k=st.integers(1, 70), seed=st.integers(0, 50))
def test_k_consecutive_positions_leave_and_wrap_around(size, k, seed):
    gradient = np.arange(1, size + 1, dtype=np.float32)
    vector, rest = take(RandomBlock(PLACE, seed=seed), gradient, k)
    count = min(k, size)
    assert len(vector) == count
    gaps = np.diff(np.append(vector.indices, vector.indices[0] + size)) - 1
    assert np.count_nonzero(gaps) <= 1  # what is not taken is consecutive, too
    whole = rest.copy()
    whole[vector.indices] += vector.values
    assert np.array_equal(whole, gradient)
    assert not rest[vector.indices].any()


def test_ranks_with_different_gradients_choose_the_same_positions_and_say_so():
    ranks = [RandomBlock(PLACE, seed=3) for _ in range(2)]
    for number in range(5):
        one, other = (take(rank, np.full(100, number + i, np.float32), 10)[0] for i, rank in enumerate(ranks))
        assert one.shared
        assert np.array_equal(one.indices, other.indices)


def test_every_position_has_its_turn():
    sparsifier, seen = RandomBlock(PLACE), np.zeros(50, bool)
    for _ in range(100):
        seen[take(sparsifier, np.ones(50, np.float32), 5)[0].indices] = True
    assert seen.all()


def test_held_positions_stay_in_the_memory():
    buffer = np.full(10, 3, np.float32)
    accumulator = Accumulator(buffer, [(0, np.ones(4, np.float32)), (7, np.ones(3, np.float32))])
    vector = RandomBlock(PLACE).take(accumulator, 10, lambda array: array)
    assert buffer.tolist() == [0, 0, 0, 0, 3, 3, 3, 0, 0, 0]
    assert vector.values.tolist() == [4, 4, 4, 4, 0, 0, 0, 4, 4, 4]


def test_the_global_generator_is_left_alone():
    before = random.getstate()
    np.random.seed(5)  # noqa: NPY002 - the global one is what must not be touched
    expected = np.random.RandomState(5).random()
    take(RandomBlock(PLACE), np.ones(10, np.float32), 3)
    assert random.getstate() == before
    assert np.random.random() == expected  # noqa: NPY002


def test_a_restored_one_goes_on():
    one, other = RandomBlock(PLACE, seed=1), RandomBlock(PLACE, seed=1)
    take(one, np.ones(1000, np.float32), 3)
    other.load_state_dict(one.state_dict())
    pair = [take(sparsifier, np.ones(1000, np.float32), 3)[0].indices for sparsifier in (one, other)]
    assert np.array_equal(*pair)
