"""Codes of indices and values on every backend against the NumPy reference; damaged codes are refused by all."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import reference
from backends import ALL, CPU, SOME, assert_parity, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import REALS, SHAPES, Array, arrays

KERNELS: Any = CPU[0].kernels
LAST = 2**31 - 2


def chosen(size: int, count: int, seed: int = 0) -> Array:
    return np.sort(np.random.default_rng(seed).choice(size, count, replace=False)).astype(np.int32)


def clustered(seed: int = 0) -> Array:
    """Runs of neighbours, far from each other: gaps of zero, and long ones."""
    generator = np.random.default_rng(seed)
    starts = np.cumsum(generator.integers(1, 100_000, 60))
    return np.unique((starts[:, None] + np.arange(50)[None, :] * generator.integers(1, 3)).ravel()).astype(np.int32)


CASES = {
    "empty": np.empty(0, np.int32),
    "one": np.array([5], np.int32),
    "the last position": np.array([LAST], np.int32),
    "both ends": np.array([0, LAST], np.int32),
    "the ends and neighbours": np.array([0, 1, 2, LAST - 1, LAST], np.int32),
    "all positions": np.arange(3000, dtype=np.int32),
    "every 64th": np.arange(0, 64 * 3000, 64, dtype=np.int32),
    "clustered": clustered(),
    "one in 100": chosen(300_000, 3000),
    "one in 10": chosen(30_000, 3000),
    "one in 2": chosen(6000, 3000),
    "one in a million": chosen(2**31 - 1, 2000),
    "a long gap in the middle": np.concatenate([np.arange(700), LAST - np.arange(700)[::-1]]).astype(np.int32),
}


def assert_coded(indices: Array, on: Any = ALL) -> None:
    """Encode and decode on all backends."""
    several = len(indices) > 1
    bits, coded = assert_parity("encode_indices", indices, on=on, waiting=2 * several)
    if len(indices):
        end = int(indices[-1]) + 1
        what = coded, len(indices), int(indices[0]), bits
        again = assert_parity("decode_indices", *what, end, on=on, waiting=int(several))
        assert_same(again, indices)
        assert_refused("decode_indices", *what, end - 1, on=on)


def assert_refused(name: str, *arguments: Any, on: Any = ALL) -> None:
    for backend in on:
        ours = backend.put(arguments)
        with pytest.raises(ValueError, match=r"indices|count|first|end|bits"):
            getattr(backend.kernels, name)(*ours)


@pytest.mark.parametrize("case", CASES)
def test_indices_of_every_kind(case: str) -> None:
    assert_coded(CASES[case])


@settings(max_examples=50)
@given(
    gaps=st.lists(st.integers(0, 5) | st.integers(0, 300) | st.integers(0, 2**24), max_size=90),
    first=st.integers(0, 2**20),
    on=SOME,
)
def test_few_indices(gaps: list[int], first: int, on: Any) -> None:
    assert_coded((first + np.cumsum([0, *(gap + 1 for gap in gaps)])).astype(np.int32), on)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_random_positions_take_little_more_than_their_entropy(density: float) -> None:
    indices = np.flatnonzero(np.random.default_rng(1).random(4_000_000) < density).astype(np.int32)
    bits, coded = KERNELS.encode_indices(indices)
    entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density
    assert 8 * coded.size <= 1.02 * entropy * indices.size
    assert_same(KERNELS.decode_indices(coded, indices.size, int(indices[0]), bits, 4_000_000), indices)


def test_plain_indices_are_checked() -> None:
    good, empty = np.array([0, 3, 9], np.int32), np.empty(0, np.int32)
    assert_parity("check_ascending", [good, empty, good], 10, waiting=1)
    for wrong in ([0, 3, 10], [-1, 3], [3, 3], [4, 2, 9]):
        assert_refused("check_ascending", [good, np.array(wrong, np.int32)], 10)


# --- damage --------------------------------------------------------------------------------------------------------


def outcome(kernels: Any, arguments: Any) -> Any:
    try:
        return kernels.decode_indices(*arguments)
    except ValueError:
        return None


def assert_judged_alike(*arguments: Any, on: Any = ALL) -> None:
    """Assert that all backends decode the reference's indices, or all refuse."""
    expected = outcome(reference, arguments)
    for backend in on:
        result = outcome(backend.kernels, backend.put(arguments))
        assert (result is None) == (expected is None), f"{backend}: {arguments}"
        if expected is not None:
            assert_same(result, expected, f"{backend}: {arguments}")


@given(seed=st.integers(0, 2**31), bits=st.integers(0, 24), on=SOME)
def test_random_bytes(seed: int, bits: int, on: Any) -> None:
    generator = np.random.default_rng(seed)
    coded = generator.integers(0, 256, generator.integers(0, 120)).astype(np.uint8) * (generator.random() < 0.9)
    ones = int(np.unpackbits(coded).sum())
    for count in {1, 2, ones + 1, ones // 2 + 1, int(generator.integers(1, 8 * coded.size + 2))}:
        first, end = map(int, generator.integers(0, [1000, 2**31]))
        if bits or count == 1 or first < end:
            assert_judged_alike(coded.astype(np.uint8), count, first, bits, end, on=on)


@given(
    case=st.sampled_from(sorted(CASES)),
    flips=st.lists(st.integers(0, 2**31), max_size=3),
    cut=st.sampled_from([0, 0, 8, 16, 1]),
    more=st.integers(-1, 1),
    on=SOME,
)
def test_damaged_codes(case: str, flips: list[int], cut: int, more: int, on: Any) -> None:
    indices = CASES[case][:200]
    bits, coded = reference.encode_indices(indices)
    coded = coded[: max(len(coded) - cut, 0)].copy()
    for flip in flips if len(coded) else []:
        coded[flip // 8 % len(coded)] ^= 1 << flip % 8
    count, first = max(len(indices) + more, 1), int(indices[0]) if len(indices) else 0
    assert_judged_alike(coded, count, first, bits, LAST + 1, on=on)


# --- levels --------------------------------------------------------------------------------------------------------

LEVELS = [(4, 0x3F800000, 23), (4, 0x40A00000, 21), (8, 0x3F800000, 16), (8, 0x42F00000, 20), (8, 0x7F700000, 20)]
LEVELS += [(4, 1 << 23, 23), (8, 0, 16), (8, 1 << 18, 17)]  # whose lowest levels are zero

levels = pytest.mark.parametrize(("bits", "top", "shift"), LEVELS)


def assert_levels(values: Array, bits: int, top: int, shift: int, on: Any = ALL) -> None:
    rounded, error = assert_parity("round_levels", values, bits, top, shift, on=on)
    codes = assert_parity("encode_levels", rounded, bits, top, shift, on=on)
    assert len(codes) == (len(values) * bits + 7) // 8
    arrived = assert_parity("decode_levels", codes, len(values), bits, top, shift, values.dtype, on=on)
    finite = np.isfinite(values)
    assert np.array_equal(arrived[finite], rounded[finite])
    assert np.isnan(arrived[~finite]).all()
    for one, part, rest in zip(*(x[finite].tolist() for x in (values, rounded, error)), strict=True):
        assert Fraction(one) == Fraction(part) + Fraction(rest)


@levels
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_levels_of_every_kind(bits: int, top: int, shift: int, dtype: Any) -> None:
    for shape in SHAPES:
        values = shape(601).astype(dtype)
        assert_levels(values, bits, top, shift)
        assert_parity("key_range", values, waiting=1)


@settings(max_examples=50)
@given(data=st.data(), n=st.integers(0, 300), level=st.sampled_from(LEVELS), on=SOME)
def test_any_numbers(data: st.DataObject, n: int, level: tuple[int, int, int], on: Any) -> None:
    values = data.draw(arrays(data.draw(st.sampled_from(REALS)), n))
    assert_levels(values, *level, on=on)
    assert_parity("key_range", values, on=on, waiting=1)


@levels
def test_values_round_to_the_nearest_level(bits: int, top: int, shift: int) -> None:
    magnitudes = reference.level_magnitudes(bits, top, shift)
    table = np.concatenate([magnitudes, -magnitudes])
    assert np.array_equal(KERNELS.round_levels(table, bits, top, shift)[0], table)
    values = np.random.default_rng(2).uniform(-1.05, 1.05, 500).astype(np.float32) * magnitudes[-1]
    rounded, _ = KERNELS.round_levels(values, bits, top, shift)
    distance = np.abs(values[:, None].astype(np.float64) - table[None, :]).min(1)
    assert np.array_equal(np.abs(values.astype(np.float64) - rounded), distance)
