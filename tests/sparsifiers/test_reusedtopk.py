"""ReusedTopK: an exact threshold now and then, reused in between."""

from __future__ import annotations

import numpy as np
import pytest
from rules import made, normal, take

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers import ReusedTopK, TopK

SIZE, K = 20_000, 200


def step(sparsifier, number, factor=1.0):
    vector, rest = take(sparsifier, np.float32(factor) * normal(number, SIZE), K)
    assert np.abs(rest).max() <= np.abs(vector.values).min()  # the largest leave
    return vector


def test_a_scheduled_step_selects_like_topk():
    sparsifier = made(ReusedTopK, SIZE, tau_threshold=3)
    for number in range(7):
        same = np.array_equal(step(sparsifier, number).indices, step(made(TopK, SIZE), number).indices)
        assert same == (number % 3 == 0)


def test_a_reused_threshold_selects_everything_that_reaches_it():
    sparsifier = made(ReusedTopK, SIZE)
    smallest = np.abs(step(sparsifier, 0).values).min()
    assert np.array_equal(step(sparsifier, 1).indices, np.flatnonzero(np.abs(normal(1, SIZE)) >= smallest))


def test_the_number_of_entries_settles_inside_the_band():
    buffer, sparsifier = np.zeros(SIZE, np.float32), made(ReusedTopK, SIZE)
    counts = [len(sparsifier.take(Accumulator(buffer, [(0, normal(number, SIZE))]), K, Step())) for number in range(90)]
    assert all(2 / 3 * K <= count <= 4 / 3 * K for count in counts[40:])
    assert np.median(counts[40:]) <= 1.2 * K  # above the band, the threshold is nudged


@pytest.mark.parametrize("factor", [1e-3, 0.5, 10.0, 1e4])
def test_a_jump_of_the_gradients_keeps_the_number_of_entries_near_the_band(factor):
    sparsifier = made(ReusedTopK, SIZE)
    for number in range(5):
        assert 2 / 3 * K <= len(step(sparsifier, number, factor if number % 2 else 1)) <= 4 / 3 * K
