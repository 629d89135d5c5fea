"""Stochastic quantization on the device against the NumPy reference: the same codes, and nothing waited for."""

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
from inputs import REALS, SCALES, SHAPES, Array, arrays, assert_same_bits, normal

from horovod_sparse.kernels import cuda

BITS = [4, 8]
SEEDS = st.integers(0, 2**63 - 1)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def assert_parity(x: Array, bits: int, seed: int, scale: float) -> None:
    buffer = on_device(x)
    with waits(0):
        codes, units = cuda.quantize(buffer, bits, seed)
    expected_codes, expected_units = reference.quantize(x, bits, seed)
    assert_same_bits(to_host(units), expected_units)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(to_host(codes), expected_codes)
    assert_same_bits(to_host(buffer), x)
    for add in (False, True):
        expected, ours = np.full_like(x, 77), on_device(np.full_like(x, 77))
        reference.dequantize(expected_codes, expected_units, expected, bits, scale, add=add)
        with waits(0):
            cuda.dequantize(codes, units, ours, bits, scale, add=add)
        assert_same_bits(to_host(ours), expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(0, 600), bits=st.sampled_from(BITS), seed=SEEDS, scale=SCALES)
def test_small_buffers(data: st.DataObject, n: int, bits: int, seed: int, scale: float) -> None:
    assert_parity(data.draw(arrays(data.draw(st.sampled_from(REALS)), n)), bits, seed, scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_distributions(shape: Callable[[int], Array], dtype: Any, bits: int) -> None:
    assert_parity(shape(8_011).astype(dtype), bits, 5, 0.3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 15, 16, 17, 127, 128, 129, 254, 255, 256, 257, 511, 513])
def test_sizes(bits: int, n: int) -> None:
    assert_parity(normal(n), bits, 1, 1.0)


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("lead", [1, 2, 4])
def test_parts_of_arrays(dtype: Any, bits: int, lead: int) -> None:
    """Buffers and codes that begin where nothing can be read as a whole."""
    x = normal(2000).astype(dtype)
    whole = on_device(x)
    codes, units = cuda.quantize(whole[lead:], bits, 3)
    expected_codes, expected_units = reference.quantize(x[lead:], bits, 3)
    np.testing.assert_array_equal(to_host(codes), expected_codes)
    moved = cupy.zeros(codes.size + lead, np.uint8)
    moved[lead:] = codes
    expected = x.copy()
    reference.dequantize(expected_codes, expected_units, expected[lead:], bits, 0.3, add=True)
    for given_, to in ((codes, whole.copy()), (moved[lead:], whole.copy())):
        cuda.dequantize(given_, units, to[lead:], bits, 0.3, add=True)
        assert_same_bits(to_host(to), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_a_block_that_is_not_finite_becomes_nan_and_no_other(bits: int, bad: float, dtype: Any) -> None:
    x = np.full(700, 2 ** (bits - 1) - 1, dtype)
    x[300] = bad
    assert_parity(x, bits, 3, 1.0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e300, 1e-300, 5e-324, 4e40, 2.0**128])
def test_blocks_beyond_float32(bits: int, size: float) -> None:
    assert_parity(normal(300).astype(np.float64) * size, bits, 3, 1.0)


def refused() -> dict[str, tuple[Callable[[], Any], str]]:
    f32, codes, units = cupy.zeros(300, np.float32), cupy.zeros(300, np.uint8), cupy.zeros(2, np.float32)
    return {
        "bits": (lambda: cuda.quantize(f32, 5, 0), "bits must be 4 or 8, not 5"),
        "bits of codes": (lambda: cuda.dequantize(codes, units, f32, 2), "bits must be 4 or 8, not 2"),
        "seed": (lambda: cuda.quantize(f32, 8, -1), "seed must not be negative, but is -1"),
        "float16": (lambda: cuda.quantize(f32.astype(np.float16), 8, 0), "buffer: dtype float16"),
        "strided": (lambda: cuda.quantize(f32[::2], 8, 0), "buffer: expected a contiguous"),
        "codes": (lambda: cuda.dequantize(codes, units, f32, 4), "codes: has 300 elements, but the buffer needs 150"),
        "units": (lambda: cuda.dequantize(codes, units[:1], f32, 8), "units: has 1 elements, but the buffer needs 2"),
        "dtype of codes": (lambda: cuda.dequantize(f32, units, f32, 8), "codes: dtype float32 is not uint8"),
        "dtype of units": (lambda: cuda.dequantize(codes, cupy.zeros(2), f32, 8), "units: dtype float64 is not"),
        "scale": (lambda: cuda.dequantize(codes, units, f32, 8, np.inf), "scale must be finite, not inf"),
    }


@pytest.mark.parametrize("name", list(refused()))
def test_bad_input_is_refused(name: str) -> None:
    call, message = refused()[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_only_arrays_of_the_device() -> None:
    f32, codes, units = cupy.zeros(300, np.float32), cupy.zeros(300, np.uint8), cupy.zeros(2, np.float32)
    for call in (
        lambda: cuda.quantize(np.zeros(300, np.float32), 8, 0),
        lambda: cuda.dequantize(np.zeros(300, np.uint8), units, f32, 8),
        lambda: cuda.dequantize(codes, np.zeros(2, np.float32), f32, 8),
        lambda: cuda.dequantize(codes, units, np.zeros(300, np.float32), 8),
    ):
        with pytest.raises(TypeError, match="expected a CuPy array"):
            call()
