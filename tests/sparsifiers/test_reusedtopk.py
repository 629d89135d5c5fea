"""ReusedTopK: an exact threshold now and then, reused in between."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import ReusedTopK, TopK

PLACE = Place(100, np.zeros(0, np.float32))

SIZE, K = 20_000, 200


def step(sparsifier, gradient, buffer, k=K):
    before = buffer + gradient
    vector = sparsifier.take(Accumulator(buffer, [(0, gradient)]), k, lambda array: array)
    after = buffer.copy()
    after[vector.indices] += vector.values
    assert np.array_equal(before, after)  # nothing is lost
    assert not buffer[vector.indices].any()
    assert np.abs(buffer).max(initial=0) <= np.abs(vector.values).min(initial=np.inf)  # the largest leave
    return vector


def normal(seed, size=SIZE):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_a_scheduled_step_takes_what_topk_takes():
    sparsifier = ReusedTopK(PLACE, tau_threshold=3)
    for number in range(7):
        vector = step(sparsifier, normal(number), np.zeros(SIZE, np.float32))
        expected = step(TopK(PLACE), normal(number), np.zeros(SIZE, np.float32))
        assert np.array_equal(vector.indices, expected.indices) == (number % 3 == 0)


def test_a_reused_threshold_takes_all_that_reach_it():
    sparsifier = ReusedTopK(PLACE)
    smallest = np.abs(step(sparsifier, normal(0), np.zeros(SIZE, np.float32)).values).min()
    vector = step(sparsifier, normal(1), np.zeros(SIZE, np.float32))
    assert np.array_equal(vector.indices, np.flatnonzero(np.abs(normal(1)) >= smallest))


def test_the_number_of_entries_settles_inside_the_band():
    buffer, sparsifier = np.zeros(SIZE, np.float32), ReusedTopK(PLACE)
    counts = [len(step(sparsifier, normal(number), buffer)) for number in range(200)]
    inside = [2 / 3 * K <= count <= 4 / 3 * K for count in counts[100:]]
    assert all(inside)
    assert np.median(counts[100:]) <= 1.2 * K  # above the band, the threshold is nudged


@pytest.mark.parametrize("factor", [1e-3, 0.5, 10.0, 1e4])
def test_a_jump_of_the_gradients_leaves_the_number_of_entries_near_the_band(factor):
    sparsifier = ReusedTopK(PLACE)
    for number in range(5):
        jump = np.float32(factor if number % 2 else 1)
        vector = step(sparsifier, jump * normal(number), np.zeros(SIZE, np.float32))
        assert 2 / 3 * K <= len(vector) <= 4 / 3 * K


def test_held_positions_are_neither_taken_nor_changed():
    sparsifier, buffer = ReusedTopK(PLACE), np.full(100, 50, np.float32)
    for factor in (1, 1e-6, 1e6):
        gradient = (factor * normal(1, 40)).astype(np.float32)
        vector = sparsifier.take(Accumulator(buffer, [(30, gradient)], 1.0), 4, lambda array: array)
        assert vector.indices.min() >= 30
        assert vector.indices.max() < 70
    assert (buffer[:30] == 50).all()
    assert (buffer[70:] == 50).all()


def test_a_restored_one_goes_on():
    buffer, one, other = np.zeros(SIZE, np.float32), ReusedTopK(PLACE), ReusedTopK(PLACE)
    step(one, normal(0), buffer)
    other.load_state_dict(one.state_dict())
    copy = buffer.copy()
    assert np.array_equal(step(one, normal(1), buffer).indices, step(other, normal(1), copy).indices)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match=r"0 < low <= 1 <= high, but is \[2, 1.0\]"):
        ReusedTopK(PLACE, local_low=2)
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        ReusedTopK(PLACE, threads=0)
