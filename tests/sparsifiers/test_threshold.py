"""Threshold: everything that reaches a given magnitude."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rules import made, take

from horovod_sparse.sparsifiers import Threshold

gradients = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-8, 8, width=16))


@settings(max_examples=50)
@given(gradient=gradients, threshold=st.sampled_from([2**-10, 0.5, 3.0, 8.0]), k=st.integers(1, 300))
def test_exactly_what_reaches_the_threshold_is_selected_for_any_k(gradient, threshold, k):
    vector, _ = take(made(Threshold, gradient.size, threshold=threshold), gradient, k)
    assert np.array_equal(vector.indices, np.flatnonzero(np.abs(gradient) >= threshold))
