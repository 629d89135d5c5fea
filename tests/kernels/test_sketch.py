"""The count sketch on every backend against the NumPy reference, and the laws of an error compressor."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
import reference
from backends import ALL, CPU, ONE_OF_EACH, SOME, assert_parity
from devices import on_device, to_host
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import REALS, SCALES, Array, arrays, assert_same_bits, normal

from horovod_sparse.kernels import cuda

# All backends compute the same, so that a law of one is a law of all.
KERNELS: Any = CPU[0].kernels
ROWS = [1, 3, 5]
NOTHING = np.empty(0, np.int32)
SEEDS = st.integers(0, 2**63 - 1)
# Empty, part of a vector, whole vectors, one section and a little more, and sections of different lengths.
SIZES = [0, 1, 15, 16, 17, 300, 16384, 16385, 32_769, 50_000]


def new_sketch(size: int, rows: int, ratio: float = 0.3, dtype: Any = np.float32) -> Array:
    return np.zeros(KERNELS.sketch_length(size, ratio, rows), dtype)


def sketch_of(x: Array, rows: int, seed: int, ratio: float = 0.3) -> Array:
    sketch = new_sketch(len(x), rows, ratio, x.dtype)
    KERNELS.sketch_update(sketch, x, NOTHING, rows, seed)
    return sketch


def estimates(x: Array, rows: int, seed: int, ratio: float = 0.3) -> Array:
    buffer = np.full_like(x, np.nan)
    KERNELS.sketch_query(sketch_of(x, rows, seed, ratio), buffer, rows, seed)
    return buffer


def integers(n: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    """Numbers whose sums are exact."""
    return np.random.default_rng(seed).integers(-100, 100, n).astype(dtype)


# --- parity --------------------------------------------------------------------------------------------------------


def positions(size: int, share: float) -> Array:
    return np.flatnonzero(np.random.default_rng(4).random(size) < share).astype(np.int32)


@settings(max_examples=50)
@given(data=st.data(), size=st.integers(0, 300), rows=st.sampled_from(ROWS), seed=SEEDS, factor=SCALES, on=SOME)
def test_small_buckets(data: st.DataObject, size: int, rows: int, seed: int, factor: float, on: Any) -> None:
    dtype = data.draw(st.sampled_from(REALS))
    buffer = data.draw(arrays(dtype, size))
    sketch = normal(KERNELS.sketch_length(size, data.draw(st.floats(0.01, 1)), rows)).astype(dtype)
    assert_parity("sketch_update", sketch, buffer, positions(size, 0.3), rows, seed, factor, on=on)
    assert_parity("sketch_query", sketch, buffer, rows, seed, factor, add=data.draw(st.booleans()), on=on)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ratio", [0.001, 1.0])
def test_every_size(size: int, rows: int, ratio: float) -> None:
    """On the device, few counters have long lists of vectors, many have short ones."""
    for dtype, on in zip(REALS, (ALL, ALL if size < 50_000 else CPU), strict=True):
        sketch = normal(KERNELS.sketch_length(size, ratio, rows), seed=1).astype(dtype)
        buffer = normal(size).astype(dtype)
        for carried, share in ((0.0, 0.5), (1.0, 0.0), (0.3, 0.9)):
            assert_parity("sketch_update", sketch, buffer, positions(size, share), rows, 7, carried, on=on)
        for add in (False, True):
            assert_parity("sketch_query", sketch, buffer, rows, 7, 0.7, add=add, on=on)


@pytest.mark.parametrize("rows", [1, 3])
def test_more_sections_than_blocks(rows: int) -> None:
    """A block goes through several sections, whose counters it copies first."""
    size = 9 * 16_384 + 100
    sketch = normal(KERNELS.sketch_length(size, 0.1, rows), seed=1)
    assert_parity("sketch_update", sketch, normal(size), positions(size, 0.01), rows, 3, 0.5)


@pytest.mark.parametrize("rows", ROWS)
def test_deliveries_in_one_section_only(rows: int) -> None:
    sketch = normal(KERNELS.sketch_length(40_000, 0.3, rows), seed=1)
    for delivered in ([13_333], [13_343, 13_344], [26_671, 39_999], [0]):
        assert_parity("sketch_update", sketch, normal(40_000), np.array(delivered, np.int32), rows, 3, 0.5)


def test_counters_without_positions_keep_negative_zero() -> None:
    """The last vector has fewer positions than lanes."""
    sketch = np.full(KERNELS.sketch_length(17, 1.0, 1), -0.0, np.float32)
    for carried in (0.5, 0.0):
        assert_parity("sketch_update", sketch, np.zeros(17, np.float32), positions(17, 0.5), 1, 3, carried)


def test_unordered_positions_do_not_corrupt_other_memory() -> None:
    """On the device they are not checked, as the host would have to wait for them."""
    sketch = cupy.zeros(cuda.sketch_length(40_000, 0.3, 1), np.float32)
    wild = np.array([5, -7, 39_999, 2**31 - 1, 3, -(2**31), 20_000], np.int32)
    for order in (wild, wild[::-1], np.sort(wild)):
        cuda.sketch_update(sketch, on_device(normal(40_000)), on_device(order), 1, 0, 1.0)
    assert np.isfinite(to_host(sketch)).all()


@given(size=st.integers(0, 10**6), ratio=st.floats(1e-6, 1), rows=st.sampled_from(ROWS))
def test_length(size: int, ratio: float, rows: int) -> None:
    length = assert_parity("sketch_length", size, ratio, rows, on=ONE_OF_EACH)
    sections = -(-size // 16384)
    assert length <= max(ratio * size, 16 * rows * sections)
    assert length > ratio * size - 16 * rows
    assert length >= 16 * rows * sections


def test_length_of_the_largest_bucket() -> None:
    assert 0.999 * 2**31 < assert_parity("sketch_length", 2**31 - 1, 1.0, 5, on=ONE_OF_EACH) < 2**31


# --- laws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches(rows: int, dtype: Any) -> None:
    a, b = integers(40_001, 0, dtype), integers(40_001, 1, dtype)
    total, updated = sketch_of(a + b, rows, 3), sketch_of(a, rows, 3)
    assert np.count_nonzero(total) > 0.9 * len(total)
    assert_same_bits(updated + sketch_of(b, rows, 3), total)
    KERNELS.sketch_update(updated, b, NOTHING, rows, 3)
    assert_same_bits(updated, total)


@pytest.mark.parametrize("rows", ROWS)
def test_nothing_is_left_after_everything_was_delivered(rows: int) -> None:
    """All positions, or those of complete sections: sections share no counter."""
    x = normal(40_000)
    for stop in (40_000, 2 * 13_328):
        sketch, buffer = sketch_of(x, rows, 3), estimates(x, rows, 3)
        buffer[:stop] = 0
        KERNELS.sketch_update(sketch, buffer, np.arange(stop, dtype=np.int32), rows, 3, 1.0)
        left, untouched = np.empty_like(x), estimates(x, rows, 3)
        KERNELS.sketch_query(sketch, left, rows, 3)
        assert np.abs(left[: stop - 32]).max() < 1e-4
        assert np.allclose(left[stop:], untouched[stop:], atol=1e-4)


@settings(max_examples=50)
@given(share=st.floats(0, 1), carried=st.floats(0, 1))
def test_no_share_of_deliveries_increases_the_norm_of_a_sketch(share: float, carried: float) -> None:
    x = normal(5000)
    sketch, buffer = sketch_of(x, 1, 3), np.float32(carried) * estimates(x, 1, 3)
    before = np.abs(sketch)
    delivered = np.flatnonzero(np.random.default_rng(5).random(5000) < share).astype(np.int32)
    buffer[delivered] = 0
    KERNELS.sketch_update(sketch, buffer, delivered, 1, 3, carried)
    assert np.all(np.abs(sketch) <= before + 1e-3)


@settings(max_examples=50)
@given(size=st.integers(1, 60_000), share=st.floats(0, 1, exclude_max=True), rows=st.sampled_from(ROWS), seed=SEEDS)
def test_a_single_element_is_returned_exactly(size: int, share: float, rows: int, seed: int) -> None:
    """Encoding and decoding agree on counters and signs; and what shares no counter with it stays zero."""
    x = np.zeros(size, np.float32)
    position = int(share * size)
    x[position] = -1.7
    result = estimates(x, rows, seed)
    assert result[position] == x[position]
    assert set(np.unique(np.abs(result))) <= {np.float32(0), np.float32(1.7)}


@pytest.mark.parametrize("rows", ROWS)
def test_a_nan_is_returned_as_nan(rows: int) -> None:
    x = normal(5000)
    x[[70, 4999]] = np.nan, -np.inf
    for backend in ALL:
        sketch, buffer = backend.put(new_sketch(5000, rows)), backend.put(np.zeros_like(x))
        with backend.active() as kernels:
            kernels.sketch_update(sketch, backend.put(x), backend.put(NOTHING), rows, 2)
            kernels.sketch_query(sketch, buffer, rows, 2)
        result = to_host(buffer)
        assert np.isnan(result[70]), backend
        assert result[4999] == -np.inf, backend


def test_seeds_and_rows_are_independent() -> None:
    """All counters and signs of a pair of rows or seeds: as many agree as by chance."""
    size, length = 16384, KERNELS.sketch_length(16384, 0.1, 3)
    groups = length // 48
    for left, right in [((0, 1), (1, 1)), ((1, 1), (2, 1)), ((0, 1), (0, 2)), ((1, 1), (0, 2))]:
        (counters, signs), (others, other_signs) = (
            reference.sketch_places(size, length, row, 3, seed) for row, seed in (left, right)
        )
        agree = np.mean(counters // 16 % groups == others // 16 % groups)
        assert abs(agree - 1 / groups) < 5 * np.sqrt(1 / groups / (size / 16))
        assert abs(np.mean(signs * other_signs)) < 5 / np.sqrt(size)


# --- statistics over seeds -----------------------------------------------------------------------------------------

TRIALS = 3000
# One section has all the mass, and gets no more than its share of the counters.
CONCENTRATED = np.append(normal(13_000), np.zeros(27_000, np.float32))


@pytest.mark.parametrize("ratio", [0.1, 0.5])
@pytest.mark.parametrize("x", [normal(1000), normal(999) ** 5, np.eye(1, 1000, 7, np.float32)[0] + 1, CONCENTRATED])
def test_the_variance_is_bounded_by_size_over_width(x: Array, ratio: float) -> None:
    """One row reaches at most the bound, and 0.9 of it, or there would be fewer counters than claimed."""
    x, trials = x.astype(np.float64), TRIALS if len(x) <= 1000 else 200
    squares = np.array([np.sum((estimates(x, 1, seed, ratio) - x) ** 2) for seed in range(trials)])
    bound = len(x) / KERNELS.sketch_length(len(x), ratio, 1) * np.sum(x**2)
    slack = 5 * squares.std() / np.sqrt(trials)
    assert 0.9 * bound - slack < squares.mean() < bound + slack
