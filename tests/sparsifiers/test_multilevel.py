"""MultiLevel: TopK's entries, found in two levels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import MultiLevel, TopK

PLACE = Place(100, np.zeros(0, np.float32))

# Few different magnitudes: ties at both levels.
gradients = hnp.arrays(np.float32, st.integers(1, 200), elements=st.integers(-4, 4).map(float))


def take(sparsifier, gradient, start, k):
    accumulator = Accumulator(np.ones(gradient.size + start, np.float32), [(start, gradient)])
    return sparsifier.take(accumulator, k, lambda array: array), accumulator.settle()


@given(
    gradient=gradients,
    start=st.integers(0, 9),
    k=st.integers(1, 250),
    cf_min=st.sampled_from([1, 1.5, 10.0, 1e6]),
)
def test_it_takes_and_leaves_what_topk_does(gradient, start, k, cf_min):
    vector, rest = take(MultiLevel(PLACE, cf_min=cf_min), gradient, start, k)
    expected, expected_rest = take(TopK(PLACE), gradient, start, k)
    assert np.array_equal(vector.indices, expected.indices)
    assert np.array_equal(vector.values, expected.values)
    assert np.array_equal(rest, expected_rest)


def test_the_first_level_leaves_one_in_cf_min(monkeypatch):
    levels = []
    whole = Accumulator.take_largest
    monkeypatch.setattr(Accumulator, "take_largest", lambda self, k, threads: levels.append(k) or whole(self, k))
    for k in (5, 50):
        take(MultiLevel(PLACE, cf_min=10), np.arange(200, dtype=np.float32), 7, k)
    assert levels == [20, 50]


@pytest.mark.parametrize("cf_min", [0.5, 0, -10, np.inf, np.nan])
def test_a_factor_that_compresses_nothing_is_refused(cf_min):
    with pytest.raises(ValueError, match=f"cf_min must be a finite number of at least 1, not {cf_min}"):
        MultiLevel(PLACE, cf_min=cf_min)
