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
