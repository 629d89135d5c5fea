"""MultiLevel: TopK's entries, found in two levels."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rules import made, take

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers import MultiLevel, TopK

# Few different magnitudes: ties at both levels.
gradients = hnp.arrays(np.float32, st.integers(1, 200), elements=st.integers(-4, 4).map(float))


@settings(max_examples=60)
@given(gradient=gradients, k=st.integers(1, 250), cf_min=st.sampled_from([1, 1.5, 10.0, 1e6]))
def test_multilevel_selects_like_topk(gradient, k, cf_min):
    vector, rest = take(made(MultiLevel, gradient.size, cf_min=cf_min), gradient, k)
    expected, expected_rest = take(made(TopK, gradient.size), gradient, k)
    assert np.array_equal(vector.indices, expected.indices)
    assert np.array_equal(rest, expected_rest)


def test_the_first_level_leaves_one_in_cf_min_of_what_is_not_held(monkeypatch):
    levels = []
    whole = Accumulator.take_largest
    monkeypatch.setattr(Accumulator, "take_largest", lambda self, k, threads: levels.append(k) or whole(self, k))
    for k in (5, 50):
        accumulator = Accumulator(np.ones(300, np.float32), [(7, np.arange(200, dtype=np.float32))])
        made(MultiLevel, 300, cf_min=10).take(accumulator, k, Step())
    assert levels == [20, 50]
