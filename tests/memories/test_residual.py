"""Residual: what is not sent is kept, what comes back is added."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.memories import Residual
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import TopK
from horovod_sparse.vector import SparseVector

LIKE = np.zeros(0, np.float32)
PLACE = Place(100, LIKE)


def residual_of(memory):
    return memory.state_dict()["residual"].copy()


@given(size=st.integers(1, 400), k=st.integers(1, 400), seed=st.integers(0, 2**31), returns=st.booleans())
def test_acc_is_the_vector_plus_what_is_kept(size, k, seed, returns):
    generator = np.random.default_rng(seed)
    memory = Residual(Place(size, LIKE))
    for _ in range(3):
        before = residual_of(memory)
        gradient = (generator.integers(-64, 64, size) / 8).astype(np.float32)
        accumulator = memory.open([(0, gradient)], 1.0)
        vector = TopK(PLACE).take(accumulator, k, lambda array: array)
        nothing = SparseVector.empty(size, gradient)
        memory.close(accumulator, vector, vector if returns else nothing)
        sent = np.zeros(size, np.float32)
        if not returns:
            sent[vector.indices] = vector.values
        assert np.array_equal(before + gradient, sent + residual_of(memory))


def test_the_old_residual_is_rescaled():
    memory = Residual(Place(3, LIKE))
    memory.load_state_dict({"residual": np.array([1, 2, 4], np.float32)})
    accumulator = memory.open([(0, np.ones(3, np.float32))], 0.5)
    assert accumulator.settle().tolist() == [1.5, 2, 3]


def test_a_sparsifier_that_takes_nothing_loses_nothing():
    memory = Residual(Place(3, LIKE))
    accumulator = memory.open([(0, np.ones(3, np.float32))], 1.0)
    nothing = SparseVector.empty(3, np.zeros(0, np.float32))
    memory.close(accumulator, nothing, nothing)
    assert residual_of(memory).tolist() == [1, 1, 1]


def test_a_state_that_is_loaded_is_copied():
    memory = Residual(Place(3, LIKE))
    state = {"residual": np.zeros(3, np.float32)}
    memory.load_state_dict(state)
    memory.open([(0, np.ones(3, np.float32))], 1.0).settle()
    assert state["residual"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("wrong", [np.zeros(4, np.float32), np.zeros(3, np.float64)], ids=["size", "dtype"])
def test_a_state_that_does_not_fit_is_refused(wrong):
    with pytest.raises(ValueError, match="does not fit a bucket of shape"):
        Residual(Place(3, LIKE)).load_state_dict({"residual": wrong})
