"""Stochastic quantization on every backend against the NumPy reference, and the laws of a compressor of errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
import reference
from backends import ALL, CPU, SOME, assert_parity, assert_same
from devices import on_device
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import REALS, SCALES, SHAPES, Array, arrays, assert_same_bits, normal

from horovod_sparse.kernels import cuda

# All backends compute the same, so that a law of one is a law of all.
KERNELS: Any = CPU[0].kernels
BITS = [4, 8, 16]
SEEDS = st.integers(0, 2**63 - 1)


def restored(x: Array, bits: int, seed: int = 0) -> Array:
    buffer = np.full_like(x, 77)
    KERNELS.dequantize(*KERNELS.quantize(x, bits, seed), buffer, bits)
    return buffer


def units_of(x: Array, bits: int) -> Array:
    """The unit of every element."""
    return np.repeat(KERNELS.quantize(x, bits, 0)[1].astype(np.float64), 256)[: len(x)]


# --- parity --------------------------------------------------------------------------------------------------------


def assert_quantized(x: Array, bits: int, seed: int, scale: float, on: Any = ALL) -> None:
    codes, units = assert_parity("quantize", x, bits, seed, on=on)
    assert codes.nbytes == (len(x) * bits + 7) // 8
    assert len(units) == -(-len(x) // 256)
    for add in (False, True):
        assert_parity("dequantize", codes, units, np.full_like(x, 77), bits, scale, add=add, on=on)


@settings(max_examples=50)
@given(data=st.data(), n=st.integers(0, 600), bits=st.sampled_from(BITS), seed=SEEDS, scale=SCALES, on=SOME)
def test_small_buffers(data: st.DataObject, n: int, bits: int, seed: int, scale: float, on: Any) -> None:
    assert_quantized(data.draw(arrays(data.draw(st.sampled_from(REALS)), n)), bits, seed, scale, on)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_distributions(shape: Callable[[int], Array], dtype: Any, bits: int) -> None:
    assert_quantized(shape(8_011).astype(dtype), bits, 5, 0.3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 15, 16, 17, 127, 128, 129, 254, 255, 256, 257, 511, 513])
def test_sizes(bits: int, n: int) -> None:
    assert_quantized(normal(n), bits, 1, 1.0)


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("lead", [1, 2, 4])
def test_parts_of_arrays_on_the_device(dtype: Any, bits: int, lead: int) -> None:
    """Buffers and codes whose addresses are not aligned for vector loads."""
    x = normal(2000).astype(dtype)
    whole = on_device(x)
    codes, units = cuda.quantize(whole[lead:], bits, 3)
    expected_codes, expected_units = reference.quantize(x[lead:], bits, 3)
    assert_same(codes, expected_codes)
    moved = cupy.zeros(codes.size + lead, codes.dtype)
    moved[lead:] = codes
    expected = x.copy()
    reference.dequantize(expected_codes, expected_units, expected[lead:], bits, 0.3, add=True)
    for given_, to in ((codes, whole.copy()), (moved[lead:], whole.copy())):
        cuda.dequantize(given_, units, to[lead:], bits, 0.3, add=True)
        assert_same(to, expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e300, 1e-300, 5e-324, 4e40, 2.0**128])
def test_blocks_beyond_float32(bits: int, size: float) -> None:
    assert_quantized(normal(300).astype(np.float64) * size, bits, 3, 1.0)


# --- laws ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(data=st.data(), n=st.integers(1, 600), bits=st.sampled_from(BITS), seed=SEEDS)
def test_every_element_is_rounded_to_an_adjacent_level(data: st.DataObject, n: int, bits: int, seed: int) -> None:
    dtype = data.draw(st.sampled_from(REALS))
    x = data.draw(arrays(dtype, n))
    x[~(np.abs(x) < 1e38)] = 3
    assert (np.abs(restored(x, bits, seed).astype(np.float64) - x) <= units_of(x, bits) * (1 + 2.0**-22)).all()


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("unit", [1.0, 2.0**-126, 0.37, 1e30])
@pytest.mark.parametrize("bits", BITS)
def test_levels_stay_unchanged(dtype: Any, unit: float, bits: int) -> None:
    """Multiples of a unit of 24 - bits significant bits, the largest among them."""
    largest, precision = 2 ** (bits - 1) - 1, 24 - bits
    mantissa, exponent = np.frexp(unit)
    unit = np.ldexp(np.round(np.ldexp(mantissa, precision)), exponent - precision)
    multiples = np.random.default_rng(0).integers(-largest, largest + 1, 1023)
    multiples[::256] = largest
    x = (unit * multiples).astype(dtype)
    for seed in range(5):
        assert_quantized(x, bits, seed, 1.0, CPU)
        assert_same_bits(restored(x, bits, seed), x)


def test_seeds_and_blocks_are_independent() -> None:
    """Halfway between levels, every element is a coin toss; seeds, blocks and halves of a block toss independently."""
    x = np.full(512 * 256, 0.5, np.float32)
    x[::256] = 7
    tosses = [2 * restored(x, 4, seed).reshape(-1, 256)[:, 1:] - 1 for seed in (0, 1, 2)]
    for a, b in [(tosses[0], tosses[1]), (tosses[1], tosses[2]), (tosses[0][1:], tosses[0][:-1])]:
        assert abs(np.mean(a * b)) < 5 / np.sqrt(a.size)
    halves = tosses[0][:, :127] * tosses[0][:, 128:]
    assert abs(halves.mean()) < 5 / np.sqrt(halves.size)


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_is_the_element_and_the_variance_is_bounded(bits: int) -> None:
    x, trials = normal(1000), 3000
    results = np.stack([restored(x, bits, seed) for seed in range(trials)]).astype(np.float64)
    units = units_of(x, bits)
    distance = np.abs(x / units - np.round(x / units))
    deviation = np.sqrt(distance * (1 - distance)) * units
    room = 5 * deviation / np.sqrt(trials) + 1e-6 * units
    bias = 2.0 ** (bits - 26)  # from rounding the quotient
    assert (np.abs(results.mean(0) - x) < room + (5 / trials + bias) * units).all()
    assert (results.var(0) <= units**2 / 4 * (1 + 1e-9)).all()
    assert abs(np.sum(results.var(0)) / np.sum(deviation**2) - 1) < 0.01


def test_an_element_far_below_the_unit_survives_in_the_mean() -> None:
    x = np.full(256 * 4000, 1e-3, np.float32)
    x[::256] = 127
    result = restored(x, 8).reshape(-1, 256)[:, 1:]
    expected, room = 1e-3, 5 * np.sqrt(1e-3 / result.size)
    assert abs(result.mean() - expected) < room < expected / 5
