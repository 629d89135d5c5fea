"""cut against the NumPy reference: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.kernels import cpu

TRICKY = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan]


def assert_same(vector: tuple[Any, Any], k: int) -> None:
    for got, expected in zip(cpu.cut(*vector, k), reference.cut(*vector, k), strict=True):
        assert got[0].dtype == np.int32
        assert np.array_equal(got[0], expected[0])
        assert got[1].tobytes() == expected[1].tobytes()


@given(
    values=st.lists(st.one_of(st.sampled_from(TRICKY), st.floats(width=32)), max_size=40),
    k=st.integers(0, 50),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_cut_takes_what_select_would(values: list[float], k: int, dtype: Any) -> None:
    indices = np.arange(0, 3 * len(values), 3, dtype=np.int32)
    assert_same((indices, np.array(values, dtype)), k)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("k", [0, 1, 2500, 9999, 10_000])
@pytest.mark.parametrize("kind", ["normal", "tied", "zero"])
def test_cut_large(dtype: Any, k: int, kind: str) -> None:
    generator = np.random.default_rng(k)
    values = {"normal": generator.standard_normal(10_000), "tied": generator.integers(-3, 4, 10_000)}
    assert_same((np.arange(10_000, dtype=np.int32), values.get(kind, np.zeros(10_000)).astype(dtype)), k)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, np.ones(3, np.float32), 1), "vector: has no indices"),
        ((np.arange(3, dtype=np.int32), np.ones(3, np.float32), -1), "k must not be negative, but is -1"),
        ((np.arange(2, dtype=np.int32), np.ones(3, np.float32), 1), "2 indices, but 3 values"),
        ((np.arange(3), np.ones(3, np.float32), 1), "dtype int64 is not int32"),
        ((np.arange(3, dtype=np.int32), np.ones(3, np.float16), 1), "float16 is neither float32 nor float64"),
    ],
)
def test_cut_refuses_what_does_not_fit(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu.cut(*arguments)
