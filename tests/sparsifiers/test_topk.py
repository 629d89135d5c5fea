"""TopK: exactly the k largest magnitudes leave the accumulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import TopK

PLACE = Place(100, np.zeros(0, np.float32))

gradients = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-8, 8, width=16))


def take(gradient, k, threads=1):
    accumulator = Accumulator(np.zeros_like(gradient), [(0, gradient)])
    return TopK(PLACE, threads=threads).take(accumulator, k, lambda array: array), accumulator.settle()


@given(gradient=gradients, k=st.integers(1, 250), threads=st.integers(1, 3))
def test_exactly_k_leave_and_none_left_is_larger(gradient, k, threads):
    vector, rest = take(gradient, k, threads)
    assert len(vector) == min(k, gradient.size)
    assert np.abs(rest).max(initial=0) <= np.abs(vector.values).min(initial=np.inf)
    assert np.array_equal(vector.values, gradient[vector.indices])
    assert not rest[vector.indices].any()


def test_ties_go_to_the_lower_index():
    vector, _ = take(np.array([1, -2, 2, -2, 1], np.float32), 2)
    assert vector.indices.tolist() == [1, 2]


def test_there_is_no_state():
    assert TopK(PLACE).state_dict() == {}
    with pytest.raises(ValueError, match="TopK has no state"):
        TopK(PLACE).load_state_dict({"threshold": 1.0})


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_refused(threads):
    with pytest.raises(ValueError, match=f"threads must be at least 1, not {threads}"):
        TopK(PLACE, threads=threads)
