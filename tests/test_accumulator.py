"""The accumulator adds gradients lazily, and only once."""

from __future__ import annotations

import numpy as np
import pytest
from rules import normal

from horovod_sparse.accumulator import Accumulator

SETTLED = [0, 12, 14, 16, 8, 10]


@pytest.fixture
def pending():
    return Accumulator(np.arange(6, dtype=np.float32), [(1, np.full(3, 10, np.float32))], scale=2.0)


def test_gradients_are_added_lazily_and_once(pending):
    assert (pending.size, pending.active_size, pending.buffer.tolist()) == (6, 3, [0, 1, 2, 3, 4, 5])
    for _ in range(2):
        assert pending.settle().tolist() == SETTLED


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda one: list(one.moments()), [3, 42, 12**2 + 14**2 + 16**2, 42, 16]),
        (lambda one: one.count_reaching([16, 13, 0, 17]), [1, 2, 3, 0]),
        (lambda one: list(one.tail(13.0)), [2, 14 + 16]),
        (lambda one: one.block_scores(2).tolist(), [144, 14**2 + 16**2, 0]),
        (lambda one: [part.tolist() for _, part in one.active()], [[12, 14, 16]]),
    ],
    ids=["moments", "counts", "tail", "scores", "active"],
)
def test_statistics_cover_active_elements_and_settle_once(pending, ask, answer):
    for _ in range(2):
        assert ask(pending) == answer
        assert pending.buffer.tolist() == SETTLED


def test_a_sample_is_the_same_before_and_after_settling_and_changes_nothing(pending):
    assert pending.sample(0, 2).tolist() == [12, 16]
    assert pending.buffer.tolist() == [0, 1, 2, 3, 4, 5]
    pending.settle()
    assert (pending.sample(0, 2).tolist(), pending.sample(1, 2).tolist()) == ([12, 16], [14])


def test_selecting_twice_scales_held_positions_once(pending):
    taken = [pending.take_largest(1), pending.take_above(14), pending.take_largest(1)]
    assert [vector.indices.tolist() for vector in taken] == [[3], [2], [1]]
    assert [vector.values.tolist() for vector in taken] == [[16], [14], [12]]
    assert pending.settle().tolist() == [0, 0, 0, 0, 8, 10]
    pending.put_back(taken[1])
    assert pending.settle().tolist() == [0, 0, 14, 0, 8, 10]


def test_held_positions_are_never_taken(pending):
    at = pending.take_at(np.array([0, 3, 5], np.int32), shared=True)
    assert (at.values.tolist(), at.shared) == ([0, 16, 0], True)
    whole = pending.take_all()
    assert (whole.indices, whole.values.tolist()) == (None, [0, 12, 14, 0, 0, 0])
    assert pending.settle().tolist() == [0, 0, 0, 0, 8, 10]


def test_keep_largest_puts_the_rest_back(pending):
    assert pending.keep_largest(pending.take_above(0), 2).indices.tolist() == [2, 3]
    assert pending.settle().tolist() == [0, 12, 0, 0, 8, 10]


def test_long_segments_can_be_taken_from_after_settling():
    size = 3 * 2**16 + 5
    pending, settled = (Accumulator(np.ones(size + 7, np.float32), [(7, normal(0, size))]) for _ in range(2))
    settled.settle()
    one, other = pending.take_above(3), settled.take_above(3)
    assert np.array_equal(one.indices, other.indices)
    assert np.array_equal(one.values, other.values)
    assert np.array_equal(pending.buffer, settled.buffer)


@pytest.mark.parametrize(
    ("begin", "end", "left"),
    [(0, 6, [12, 14, 16]), (0, 2, [12]), (2, 3, [14]), (2, 5, [14, 16]), (4, 6, []), (0, 1, []), (3, 3, [])],
)
def test_a_part_holds_the_active_elements_between_its_ends(pending, begin, end, left):
    part = pending.part(begin, end)
    assert pending.buffer.tolist() == SETTLED
    assert (part.active_size, [value for _, values in part.active() for value in values]) == (len(left), left)
    vector = part.take_largest(9)
    assert (vector.values.tolist(), vector.size) == (left, 6)
    assert pending.settle().sum() == sum(SETTLED) - sum(left)
    part.put_back(vector)
    assert pending.settle().tolist() == SETTLED
    assert pending.magnitude(vector) == 16  # of all, not of the part


def test_taking_everything_after_a_selection_outside_of_a_region_leaves_nothing():
    """Also where the buffer was known to hold zeros before."""
    gradient = np.arange(1, 13, dtype=np.float32)
    accumulator = Accumulator(np.zeros(12, np.float32), [(0, gradient)], empty=True)
    taken = accumulator.outside(4, 8).take_largest(3)
    accumulator.put_back(taken)
    everything = accumulator.take_all()
    assert np.array_equal(everything.values, gradient)
    assert not accumulator.buffer.any()
