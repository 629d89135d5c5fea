"""The accumulator adds up late, and once."""

from __future__ import annotations

import numpy as np
import pytest

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


def test_taking_twice_is_refused():
    pending = accumulator()
    pending.settle()
    with pytest.raises(RuntimeError, match="settled"):
        pending.take_largest(1)
