"""Stochastic quantization against the NumPy reference, and the laws that make it a compressor of errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from inputs import REALS, SCALES, SHAPES, Array, arrays, assert_same_bits, normal, read_only

from horovod_sparse.kernels import cpu

BITS = [4, 8]
SEEDS = st.integers(0, 2**63 - 1)


def restored(x: Array, bits: int, seed: int = 0) -> Array:
    buffer = np.full_like(x, 77)
    cpu.dequantize(*cpu.quantize(x, bits, seed), buffer, bits)
    return buffer


def units_of(x: Array, bits: int) -> Array:
    """The unit of every element."""
    return np.repeat(cpu.quantize(x, bits, 0)[1].astype(np.float64), 256)[: len(x)]


# --- parity --------------------------------------------------------------------------------------------------------


def assert_parity(x: Array, bits: int, seed: int, scale: float) -> None:
    before = x.copy()
    codes, units = cpu.quantize(x, bits, seed)
    expected_codes, expected_units = reference.quantize(x, bits, seed)
    assert_same_bits(units, expected_units)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes, expected_codes)
    assert_same_bits(x, before)
    for add in (False, True):
        ours, expected = np.full_like(x, 77), np.full_like(x, 77)
        cpu.dequantize(codes, units, ours, bits, scale, add=add)
        reference.dequantize(codes, units, expected, bits, scale, add=add)
        assert_same_bits(ours, expected)


@given(data=st.data(), n=st.integers(0, 600), bits=st.sampled_from(BITS), seed=SEEDS, scale=SCALES)
def test_small_buffers(level: str, data: st.DataObject, n: int, bits: int, seed: int, scale: float) -> None:
    assert_parity(data.draw(arrays(data.draw(st.sampled_from(REALS)), n)), bits, seed, scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_distributions(level: str, shape: Any, dtype: Any, bits: int) -> None:
    assert_parity(shape(30_011).astype(dtype), bits, 5, 0.3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 15, 16, 17, 127, 255, 256, 257, 511, 513])
def test_sizes(level: str, bits: int, n: int) -> None:
    x = normal(n)
    codes, units = cpu.quantize(x, bits, 1)
    assert len(codes) == (n * bits + 7) // 8
    assert len(units) == -(-n // 256)
    assert_parity(x, bits, 1, 1.0)


# --- laws ----------------------------------------------------------------------------------------------------------


@given(data=st.data(), n=st.integers(1, 600), bits=st.sampled_from(BITS), seed=SEEDS)
def test_every_element_goes_to_a_level_next_to_it(data: st.DataObject, n: int, bits: int, seed: int) -> None:
    dtype = data.draw(st.sampled_from(REALS))
    x = data.draw(arrays(dtype, n))
    x[~(np.abs(x) < 1e38)] = 3
    assert (np.abs(restored(x, bits, seed).astype(np.float64) - x) <= units_of(x, bits) * (1 + 2.0**-22)).all()


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("unit", [1.0, 2.0**-126, 0.37, 1e30])
@pytest.mark.parametrize("bits", BITS)
def test_levels_stay_as_they_are(level: str, dtype: Any, unit: float, bits: int) -> None:
    """Multiples of a unit of 16 significant bits, the largest among them."""
    largest = 2 ** (bits - 1) - 1
    mantissa, exponent = np.frexp(unit)
    unit = np.ldexp(np.round(mantissa * 2**16) / 2**16, exponent)
    x = (unit * np.resize(np.arange(-largest, largest + 1), 1023)).astype(dtype)
    for seed in range(20):
        assert_same_bits(restored(x, bits, seed), x)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_zero_elements_stay_zero(dtype: Any) -> None:
    x = normal(2000).astype(dtype)
    x[::3] = 0
    x[256:512] = 0
    x[300] = -0.0
    for bits in BITS:
        result = restored(x, bits)
        assert not result[::3].any()
        assert not result[256:512].any()
        assert cpu.quantize(x, bits, 0)[1][1] == 0


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_a_block_that_is_not_finite_becomes_nan_and_no_other(level: str, bits: int, bad: float, dtype: Any) -> None:
    level = 2 ** (bits - 1) - 1
    x = np.full(700, level, dtype)
    x[300] = bad
    result = restored(x, bits)
    assert np.isnan(result[256:512]).all()
    np.testing.assert_array_equal(np.delete(result, np.s_[256:512]), level)


def test_a_block_beyond_float32_becomes_nan() -> None:
    assert np.isnan(restored(np.full(10, 1e300), 8)).all()
    assert (restored(np.full(10, 1e-300), 8) == 0).all(), "the least unit is that of float32"


def test_seeds_and_blocks_are_independent() -> None:
    """Halfway between levels, every element is a coin: no two seeds, blocks or halves of a block toss the same one."""
    x = np.full(512 * 256, 0.5, np.float32)
    x[::256] = 7
    tosses = [2 * restored(x, 4, seed).reshape(-1, 256)[:, 1:] - 1 for seed in (0, 1, 2)]
    for a, b in [(tosses[0], tosses[1]), (tosses[1], tosses[2]), (tosses[0][1:], tosses[0][:-1])]:
        assert abs(np.mean(a * b)) < 5 / np.sqrt(a.size)
    halves = tosses[0][:, :127] * tosses[0][:, 128:]
    assert abs(halves.mean()) < 5 / np.sqrt(halves.size)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_the_mean_is_the_element_and_the_variance_is_bounded(bits: int, dtype: Any) -> None:
    x, trials = normal(1000).astype(dtype), 3000
    results = np.stack([restored(x, bits, seed) for seed in range(trials)]).astype(np.float64)
    units = units_of(x, bits)
    distance = np.abs(x / units - np.round(x / units))
    deviation = np.sqrt(distance * (1 - distance)) * units
    room = 5 * deviation / np.sqrt(trials) + 1e-6 * units
    assert (np.abs(results.mean(0) - x) < room + 5 * units / trials).all()
    assert (results.var(0) <= units**2 / 4 * (1 + 1e-9)).all()
    assert abs(np.sum(results.var(0)) / np.sum(deviation**2) - 1) < 0.01


def test_an_element_far_below_the_unit_survives_in_the_mean() -> None:
    x = np.full(256 * 4000, 1e-3, np.float32)
    x[::256] = 127
    result = restored(x, 8).reshape(-1, 256)[:, 1:]
    expected, room = 1e-3, 5 * np.sqrt(1e-3 / result.size)
    assert abs(result.mean() - expected) < room < expected / 5


# --- refused input -------------------------------------------------------------------------------------------------

F32 = np.zeros(300, np.float32)
CODES = np.zeros(300, np.uint8)
UNITS = np.zeros(2, np.float32)

REFUSED = {
    "bits": (lambda: cpu.quantize(F32, 5, 0), "bits must be 4 or 8, not 5"),
    "bits of codes": (lambda: cpu.dequantize(CODES, UNITS, F32, 2), "bits must be 4 or 8, not 2"),
    "seed": (lambda: cpu.quantize(F32, 8, -1), "seed must not be negative, but is -1"),
    "float16": (lambda: cpu.quantize(F32.astype(np.float16), 8, 0), "buffer: dtype float16"),
    "strided": (lambda: cpu.quantize(F32[::2], 8, 0), "buffer: must be contiguous"),
    "read-only": (lambda: cpu.dequantize(CODES, UNITS, read_only(F32), 8), "buffer: is read-only"),
    "codes": (lambda: cpu.dequantize(CODES, UNITS, F32, 4), "codes: has 300 elements, but the buffer needs 150"),
    "units": (lambda: cpu.dequantize(CODES, UNITS[:1], F32, 8), "units: has 1 elements, but the buffer needs 2"),
    "dtype of codes": (lambda: cpu.dequantize(F32, UNITS, F32, 8), "codes: dtype float32 is not uint8"),
    "dtype of units": (lambda: cpu.dequantize(CODES, np.zeros(2), F32, 8), "units: dtype float64 is not float32"),
    "scale": (lambda: cpu.dequantize(CODES, UNITS, F32, 8, np.inf), "scale must be finite, not inf"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
    assert not F32.any(), "refused before anything is written"


def test_only_arrays() -> None:
    with pytest.raises(TypeError, match="codes: expected a NumPy array, not <class 'list'>"):
        cpu.dequantize([0], UNITS, F32, 8)  # type: ignore[arg-type]
