"""Top-k in chunks: each chunk sends its largest magnitudes, whatever those of the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import SPREADS, made, normal, spread, take

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers import chunked


def published(values, k, chunk):
    """A mask of what is selected."""
    chosen, size = np.zeros(values.shape, bool), values.shape[-1]
    for begin in range(0, size, chunk):
        part = np.abs(values[..., begin : begin + chunk])
        keep = max(1, round(k / size * part.shape[-1]))
        largest = np.argsort(-part, axis=-1, kind="stable")[..., :keep]
        np.put_along_axis(chosen[..., begin : begin + chunk], largest, True, axis=-1)
    return chosen


@settings(max_examples=100)
@given(
    size=st.integers(1, 500),
    chunk=st.integers(1, 300),
    density=st.floats(0.001, 1),
    at_a_time=st.sampled_from([1, 64, 1000]),
    kind=st.sampled_from(SPREADS),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 999),
)
def test_a_selection_equals_the_reference(size, chunk, density, at_a_time, kind, dtype, seed):
    values, k = spread(np.random.default_rng(seed), kind, size).astype(dtype), max(1, round(density * size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "_AT_A_TIME", {True: at_a_time})
        vector, _ = take(made(chunked.ChunkedTopK, size, chunk=chunk), values, k)
    expected = np.flatnonzero(published(values, k, min(chunk, size)))
    assert vector.indices.dtype == np.int32
    assert np.array_equal(vector.indices, expected)
    assert np.array_equal(vector.values, values[expected])


def test_the_active_elements_of_a_chunk_send_in_place_of_held_ones():
    accumulator = Accumulator(normal(0, 40), [(3, np.zeros(5, np.float32)), (12, np.zeros(28, np.float32))])
    before = accumulator.buffer.copy()
    vector = made(chunked.ChunkedTopK, 40, chunk=10).take(accumulator, 24, Step())  # 6 of each chunk
    assert [int(np.sum(vector.indices // 10 == row)) for row in range(4)] == [5, 6, 6, 6]
    assert not set(vector.indices) & {0, 1, 2, 8, 9, 10, 11}
    assert np.array_equal(vector.values, before[vector.indices])


@pytest.mark.parametrize("largest", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_is_the_largest(largest):
    values = normal(0, 100)
    values[7] = largest
    vector, _ = take(made(chunked.ChunkedTopK, 100, chunk=50), values, 2)
    assert vector.indices[0] == 7
