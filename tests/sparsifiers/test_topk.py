"""TopK: exactly the k largest magnitudes are selected."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rules import made, take

from horovod_sparse.sparsifiers import TopK

gradients = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-8, 8, width=16))


@settings(max_examples=60)
@given(gradient=gradients, k=st.integers(1, 250), threads=st.integers(1, 3))
def test_exactly_k_are_selected_and_ties_go_to_the_lower_index(gradient, k, threads):
    vector, rest = take(made(TopK, gradient.size, threads=threads), gradient, k)
    expected = np.sort(np.argsort(-np.abs(gradient), kind="stable")[:k])
    assert np.array_equal(vector.indices, expected)
    assert np.array_equal(vector.values, gradient[expected])
    assert not rest[expected].any()
