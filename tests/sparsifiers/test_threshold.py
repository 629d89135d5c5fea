"""Threshold: all that reach a given magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.compression import Sparse
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import Threshold

PLACE = Place(100, np.zeros(0, np.float32))

gradients = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-8, 8, width=16))


@given(gradient=gradients, threshold=st.sampled_from([2**-10, 0.5, 3.0, 8.0]), k=st.integers(1, 300))
def test_exactly_those_that_reach_it_leave_whatever_k_is(gradient, threshold, k):
    buffer = np.zeros_like(gradient)
    vector = Threshold(PLACE, threshold=threshold).take(Accumulator(buffer, [(0, gradient)]), k, lambda array: array)
    assert np.array_equal(vector.indices, np.flatnonzero(np.abs(gradient) >= threshold))


@pytest.mark.parametrize("threshold", [None, 0, -0.5, np.inf, np.nan, "much"])
def test_what_is_no_positive_number_is_refused(threshold):
    with pytest.raises(ValueError, match=f"threshold must be a finite number above 0, not {threshold!r}: give"):
        Threshold(PLACE, threshold=threshold)


def test_a_configuration_must_give_it():
    with pytest.raises(ValueError, match="give the option threshold, the smallest magnitude"):
        Sparse(0.01, sparsifier="threshold")
    assert Sparse(0.01, sparsifier="threshold", options={"threshold": 1e-3}).options == {"threshold": 1e-3}
