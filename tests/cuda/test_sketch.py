"""Count sketches on the device against the NumPy reference: the same bits, and nothing waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import pytest
import reference
from devices import on_device, to_host, waits
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import REALS, SCALES, Array, arrays, assert_same_bits, normal

from horovod_sparse.kernels import cuda

_EXAMPLES = settings(max_examples=30, deadline=None)
ROWS = [1, 3, 5]
SEEDS = st.integers(0, 2**63 - 1)
# Empty, part of a vector, whole vectors, one section and a little more, and sections of different lengths.
SIZES = [0, 1, 16, 17, 300, 16384, 16385, 50_000]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def assert_update(sketch: Array, buffer: Array, delivered: Array, *arguments: Any) -> None:
    expected, ours = sketch.copy(), on_device(sketch)
    reference.sketch_update(expected, buffer, delivered, *arguments)
    given_ = on_device(buffer), on_device(delivered)
    with waits(0):
        cuda.sketch_update(ours, *given_, *arguments)
    assert_same_bits(to_host(ours), expected)


def assert_query(sketch: Array, buffer: Array, *arguments: Any, add: bool) -> None:
    expected, ours, given_ = buffer.copy(), on_device(buffer), on_device(sketch)
    reference.sketch_query(sketch, expected, *arguments, add=add)
    with waits(0):
        cuda.sketch_query(given_, ours, *arguments, add=add)
    assert_same_bits(to_host(ours), expected)


def positions(size: int, share: float, seed: int = 4) -> Array:
    return np.flatnonzero(np.random.default_rng(seed).random(size) < share).astype(np.int32)


@_EXAMPLES
@given(data=st.data(), size=st.integers(0, 300), rows=st.sampled_from(ROWS), seed=SEEDS, factor=SCALES)
def test_small_buckets(data: st.DataObject, size: int, rows: int, seed: int, factor: float) -> None:
    dtype = data.draw(st.sampled_from(REALS))
    buffer = data.draw(arrays(dtype, size))
    sketch = normal(cuda.sketch_length(size, data.draw(st.floats(0.01, 1)), rows)).astype(dtype)
    assert_update(sketch, buffer, positions(size, 0.3), rows, seed, factor)
    assert_query(sketch, buffer, rows, seed, factor, add=data.draw(st.booleans()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("ratio", [0.001, 0.3])
def test_every_size(size: int, rows: int, dtype: Any, ratio: float) -> None:
    """Few counters have long lists of vectors, many have short ones."""
    sketch = normal(cuda.sketch_length(size, ratio, rows), seed=1).astype(dtype)
    buffer = normal(size).astype(dtype)
    for carried, share in ((0.0, 0.5), (1.0, 0.0), (0.3, 0.9)):
        assert_update(sketch, buffer, positions(size, share), rows, 7, carried)
    for add in (False, True):
        assert_query(sketch, buffer, rows, 7, 0.7, add=add)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [16384, 32_769])
def test_sketches_as_long_as_their_buckets(rows: int, size: int) -> None:
    sketch = normal(cuda.sketch_length(size, 1.0, rows), seed=1)
    assert_update(sketch, normal(size), positions(size, 0.1), rows, 3, 1.0)
    assert_query(sketch, normal(size), rows, 3, 1.0, add=False)


@pytest.mark.parametrize("rows", [1, 3])
def test_more_sections_than_blocks(rows: int) -> None:
    """A block goes through several sections, whose counters it copies first."""
    size = 9 * 16_384 + 100
    sketch = normal(cuda.sketch_length(size, 0.1, rows), seed=1)
    assert_update(sketch, normal(size), positions(size, 0.01), rows, 3, 0.5)


@pytest.mark.parametrize("rows", ROWS)
def test_deliveries_in_one_section_only(rows: int) -> None:
    sketch = normal(cuda.sketch_length(40_000, 0.3, rows), seed=1)
    for delivered in ([13_333], [13_343, 13_344], [26_671, 39_999], [0]):
        assert_update(sketch, normal(40_000), np.array(delivered, np.int32), rows, 3, 0.5)


def test_counters_of_negative_zero_stay_where_no_position_is() -> None:
    """The last vector has fewer positions than lanes."""
    sketch = np.full(cuda.sketch_length(17, 1.0, 1), -0.0, np.float32)
    assert_update(sketch, np.zeros(17, np.float32), positions(17, 0.5), 1, 3, 0.5)
    assert_update(sketch, np.zeros(17, np.float32), positions(17, 0.5), 1, 3, 0.0)


@pytest.mark.parametrize("rows", ROWS)
def test_a_nan_stays_visible(rows: int) -> None:
    x = normal(5000)
    x[[70, 4999]] = np.nan, -np.inf
    sketch, buffer = cupy.zeros(cuda.sketch_length(5000, 0.3, rows), np.float32), cupy.empty(5000, np.float32)
    cuda.sketch_update(sketch, on_device(x), on_device(positions(0, 0)), rows, 2)
    cuda.sketch_query(sketch, buffer, rows, 2)
    result = to_host(buffer)
    assert np.isnan(result[70])
    assert result[4999] == -np.inf


def test_positions_that_do_not_ascend_do_no_harm_elsewhere() -> None:
    """They are not checked, as the host would have to wait for them."""
    sketch = cupy.zeros(cuda.sketch_length(40_000, 0.3, 1), np.float32)
    wild = np.array([5, -7, 39_999, 2**31 - 1, 3, -(2**31), 20_000], np.int32)
    for order in (wild, wild[::-1], np.sort(wild)):
        cuda.sketch_update(sketch, on_device(normal(40_000)), on_device(order), 1, 0, 1.0)
    assert np.isfinite(to_host(sketch)).all()


@given(size=st.integers(0, 2**31 - 1), ratio=st.floats(1e-6, 1), rows=st.sampled_from(ROWS))
def test_length(size: int, ratio: float, rows: int) -> None:
    assert cuda.sketch_length(size, ratio, rows) == reference.sketch_length(size, ratio, rows)


def refused() -> dict[str, tuple[Callable[[], Any], str]]:
    f32, f100, none = cupy.zeros(32, np.float32), cupy.zeros(100, np.float32), cupy.empty(0, np.int32)
    return {
        "rows": (lambda: cuda.sketch_length(100, 0.5, 2), "rows must be 1, 3 or 5, not 2"),
        "no ratio": (lambda: cuda.sketch_length(100, 0.0, 1), "ratio must be above 0 and at most 1, not 0.0"),
        "large ratio": (lambda: cuda.sketch_length(100, 1.01, 1), "ratio must be above 0 and at most 1, not 1.01"),
        "NaN ratio": (lambda: cuda.sketch_length(100, np.nan, 1), "ratio must be above 0 and at most 1, not nan"),
        "negative size": (lambda: cuda.sketch_length(-1, 0.5, 1), "size must not be negative, but is -1"),
        "2**31": (lambda: cuda.sketch_length(2**31, 0.5, 1), "size: 2147483648 elements"),
        "length": (lambda: cuda.sketch_update(f32[:31], f100, none, 1, 0), "31 counters do not fit a bucket of 100"),
        "length for rows": (lambda: cuda.sketch_update(f32, f100, none, 3, 0), "32 counters do not fit"),
        "no counters": (lambda: cuda.sketch_update(f32[:0], f100, none, 1, 0), "0 counters do not fit"),
        "too few": (lambda: cuda.sketch_query(f32, cupy.ones(40_000, np.float32), 1, 0), "32 counters do not fit"),
        "too many": (lambda: cuda.sketch_query(cupy.ones(112, np.float32), f100, 1, 0), "112 counters do not fit"),
        "no bucket": (lambda: cuda.sketch_query(f32, f32[:0], 1, 0), "32 counters do not fit a bucket of 0"),
        "bad rows": (lambda: cuda.sketch_query(f32, f100, 4, 0), "rows must be 1, 3 or 5, not 4"),
        "seed": (lambda: cuda.sketch_update(f32, f100, none, 1, -1), "seed must not be negative, but is -1"),
        "large seed": (lambda: cuda.sketch_query(f32, f100, 1, 2**63), "seed must be less than"),
        "carried": (lambda: cuda.sketch_update(f32, f100, none, 1, 0, np.inf), "carried must be finite, not inf"),
        "scale": (lambda: cuda.sketch_query(f32, f100, 1, 0, np.nan), "scale must be finite, not nan"),
        "strided": (lambda: cuda.sketch_update(f32[::2], f100, none, 1, 0), "sketch: expected a contiguous"),
        "float16": (lambda: cuda.sketch_update(f32, f100.astype(np.float16), none, 1, 0), "buffer: dtype float16"),
        "dtypes": (lambda: cuda.sketch_query(f32, cupy.zeros(32), 1, 0), "sketch: dtype float32 is not float64"),
        "delivered": (lambda: cuda.sketch_update(f32, f100, cupy.zeros(3, np.int64), 1, 0), "delivered: dtype int64"),
    }


@pytest.mark.parametrize("name", list(refused()))
def test_bad_input_is_refused(name: str) -> None:
    call, message = refused()[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_only_arrays_of_the_device() -> None:
    sketch, buffer, none = cupy.zeros(32, np.float32), cupy.zeros(100, np.float32), cupy.empty(0, np.int32)
    host = np.zeros(32, np.float32)
    for call in (
        lambda: cuda.sketch_update(host, buffer, none, 1, 0),
        lambda: cuda.sketch_update(sketch, host, none, 1, 0),
        lambda: cuda.sketch_update(sketch, buffer, np.empty(0, np.int32), 1, 0),
        lambda: cuda.sketch_query(sketch, host, 1, 0),
    ):
        with pytest.raises(TypeError, match="expected a CuPy array"):
            call()
