"""The accumulator adds up late, and once."""

from __future__ import annotations

import numpy as np

from horovod_sparse.accumulator import Accumulator


def accumulator(scale=1.0):
    return Accumulator(np.arange(6, dtype=np.float32), [(1, np.full(3, 10, np.float32))], scale)


def test_nothing_is_added_before_it_must_be():
    pending = accumulator()
    assert pending.buffer.tolist() == [0, 1, 2, 3, 4, 5]
    assert pending.size == 6


def test_settling_twice_adds_once():
    pending = accumulator(scale=2.0)
    for _ in range(2):
        assert pending.settle().tolist() == [0, 12, 14, 16, 8, 10]


def test_taking_settles():
    pending = accumulator()
    vector = pending.take_largest(2)
    assert (vector.indices.tolist(), vector.values.tolist(), vector.size) == ([2, 3], [12, 13], 6)
    assert pending.settle().tolist() == [0, 11, 0, 0, 4, 5]


def test_what_is_left_can_be_taken_in_another_turn():
    pending = accumulator(scale=2.0)
    taken = [pending.take_largest(1), pending.take_above(14), pending.take_largest(1)]
    assert [vector.indices.tolist() for vector in taken] == [[3], [2], [1]]
    assert [vector.values.tolist() for vector in taken] == [[16], [14], [12]]
    assert pending.settle().tolist() == [0, 0, 0, 0, 8, 10]  # held positions are scaled once


def test_everything_but_what_is_held_can_be_taken():
    pending = accumulator(scale=2.0)
    vector = pending.take_all()
    assert vector.indices is None
    assert vector.values.tolist() == [0, 12, 14, 16, 0, 0]
    assert pending.settle().tolist() == [0, 0, 0, 0, 8, 10]


def test_moments_are_those_of_what_is_not_held_and_settle():
    pending = accumulator(scale=2.0)
    assert pending.active_size == 3
    for _ in range(2):
        assert tuple(pending.moments()) == (3, 42, 12**2 + 14**2 + 16**2, 42, 16)
        assert pending.buffer.tolist() == [0, 12, 14, 16, 8, 10]


def test_a_sample_is_the_same_before_and_after_settling_and_changes_nothing():
    pending = accumulator(scale=2.0)
    assert pending.sample(0, 2).tolist() == [12, 16]
    assert pending.buffer.tolist() == [0, 1, 2, 3, 4, 5]
    pending.settle()
    assert pending.sample(0, 2).tolist() == [12, 16]
    assert pending.sample(1, 2).tolist() == [14]


def test_counting_settles_once():
    pending = accumulator(scale=2.0)
    for _ in range(2):
        assert pending.count_reaching([16, 13, 0, 17]) == [1, 2, 3, 0]
    assert pending.buffer.tolist() == [0, 12, 14, 16, 8, 10]


def test_scores_are_those_of_what_is_not_held_and_settle_once():
    pending = accumulator(scale=2.0)
    for _ in range(2):
        assert pending.block_scores(2).tolist() == [144, 14**2 + 16**2, 0]
    assert pending.buffer.tolist() == [0, 12, 14, 16, 8, 10]


def test_of_what_was_taken_only_the_largest_may_be_kept():
    pending = accumulator(scale=2.0)
    vector = pending.keep_largest(pending.take_above(0), 2)
    assert vector.indices.tolist() == [2, 3]
    assert pending.settle().tolist() == [0, 12, 0, 0, 8, 10]


def test_long_segments_can_be_taken_from_after_settling():
    size = 3 * 2**16 + 5
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    pending, settled = (Accumulator(np.ones(size + 7, np.float32), [(7, values)]) for _ in range(2))
    settled.settle()
    one, other = pending.take_above(3), settled.take_above(3)
    assert np.array_equal(one.indices, other.indices)
    assert np.array_equal(one.values, other.values)
    assert np.array_equal(pending.buffer, settled.buffer)
