"""NoMemory: every step starts from nothing."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.memories import NoMemory
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import TopK
from horovod_sparse.vector import SparseVector

LIKE = np.zeros(0, np.float32)
PLACE = Place(100, LIKE)


def test_every_step_sees_its_gradient_alone():
    memory = NoMemory(Place(4, LIKE))
    gradient = np.array([1, -3, 2, 0], np.float32)
    for _ in range(3):
        accumulator = memory.open([(0, gradient)], scale=7.0)
        vector = TopK(PLACE).take(accumulator, 1, lambda array: array)
        assert (vector.indices.tolist(), vector.values.tolist()) == ([1], [-3])
        memory.close(accumulator, vector, SparseVector.empty(4, gradient))


def test_a_poisoned_step_does_not_reach_the_next():
    memory = NoMemory(Place(2, LIKE))
    memory.open([(0, np.array([np.nan, np.inf], np.float32))], 1.0).settle()
    assert memory.open([(0, np.ones(2, np.float32))], 1.0).settle().tolist() == [1, 1]


def test_there_is_no_state():
    memory = NoMemory(Place(2, LIKE))
    assert memory.state_dict() == {}
    memory.load_state_dict({})
    with pytest.raises(ValueError, match=r"NoMemory has no state, .*\['residual'\]"):
        memory.load_state_dict({"residual": np.zeros(2)})
