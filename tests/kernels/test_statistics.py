"""Moments, counts, norms, scores and samples on every backend are bitwise identical to the NumPy reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference
from backends import ALL, CPU, ONE_OF_EACH, SOME, OnHost, assert_parity
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import (
    FORMATS,
    LAYOUTS,
    REALS,
    SCALES,
    SHAPES,
    Array,
    as_given,
    assert_same_bits,
    buckets,
    every_third,
    layered,
    normal,
    odd_address,
    read_only,
    reversed_,
)

from horovod_sparse.kernels.types import Moments

Shape = Callable[[int], Array]
Segments = list[tuple[int, Array]]
THREADS = st.integers(1, 3)
THRESHOLDS = [0.0, -0.0, 5e-324, 1e-45, 0.3, 1.0, 1.5, 2.0, 3.0, 65504.0, 3.4e38, 1e300, np.inf]
# Far above what float64 loses over these sizes, far below what a lost or repeated element makes.
PRECISION = 1e-13

formats = pytest.mark.parametrize("format_", FORMATS, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", REALS, ids=str)


def split(x: Array, cuts: list[int], gap: int) -> Segments:
    """Segments that cover x between the cuts, with a gap of held positions in front of each but the first."""
    bounds = pairwise([0, *cuts, len(x)])
    return [(start + gap * i, x[start:stop]) for i, (start, stop) in enumerate(bounds)]


def any_active(segments: Segments) -> int:
    return int(any(len(part) for _, part in segments))


def places_of(on: Any, layout: Callable[[Array], Array]) -> Any:
    """Backends for arrays of a layout, which only the CPU knows others of."""
    return on if layout is as_given else CPU


def assert_near(ours: float, expected: Any, terms: Any) -> None:
    """Equal up to the rounding of float64 sums of terms with this sum of magnitudes."""
    atol = PRECISION * float(terms) + 1e-300 if np.isfinite(terms) else 0
    np.testing.assert_allclose(ours, np.float64(expected), rtol=0, atol=atol)


def assert_moments(segments: Segments, buffer: Array, scale: float = 1.0, threads: Any = (1,), on: Any = ALL) -> Any:
    waiting = any_active(segments)
    moments = assert_parity("accumulate_moments", segments, buffer, scale, threads=threads, waiting=waiting, on=on)
    expected = buffer.copy()
    reference.accumulate(segments, expected, scale)
    count, total, squares, magnitudes, largest = reference.exact_moments(segments, expected)
    assert moments[0] == count
    assert_near(moments[1], total, magnitudes)
    assert_near(moments[2], squares, squares)
    assert_near(moments[3], magnitudes, magnitudes)
    np.testing.assert_array_equal(moments[4], np.float64(largest))
    return moments


def assert_counts(segments: Segments, buffer: Array, thresholds: Any, threads: Any = (1,), on: Any = ALL) -> Any:
    asked = np.array(thresholds, np.float64)
    how = {"threads": threads, "waiting": int(len(asked) > 0 and any_active(segments)), "on": on}
    return assert_parity("count_reaching", segments, read_only(buffer), OnHost(asked), **how).tolist()


def assert_tail(segments: Segments, buffer: Array, threshold: float, threads: Any = (1,), on: Any = ALL) -> Any:
    how = {"threads": threads, "waiting": 2 * any_active(segments), "on": on}
    return assert_parity("tail", segments, read_only(buffer), threshold, **how)


def assert_square_norm(segments: Segments, on: Any = ALL) -> float:
    norm = assert_parity("square_norm", segments, waiting=any_active(segments), on=on)
    exact = reference.exact_square_norm(segments)
    assert_near(norm, exact, exact)
    return float(norm)


def assert_scores(segments: Segments, buffer: Array, block: int, threads: Any = (1,), on: Any = ALL) -> Any:
    return assert_parity("block_scores", segments, read_only(buffer), block, threads=threads, on=on)


def assert_sample(segments: Segments, buffer: Array, scale: float, start: int, stride: int, on: Any = ALL) -> Any:
    return assert_parity("sample", segments, read_only(buffer), scale, start, stride, on=on)


def assert_largest(segments: Segments, on: Any = ALL) -> float:
    return float(assert_parity("largest", segments, waiting=any_active(segments), on=on))


# --- all of them ---------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    bucket=buckets(),
    scale=SCALES,
    thresholds=st.lists(st.sampled_from(THRESHOLDS) | st.floats(0, 10), max_size=16),
    numbers=st.tuples(st.integers(0, 400), st.integers(1, 400)),
    threads=THREADS,
    on=SOME,
)
def test_small_buckets(
    bucket: Any, scale: float, thresholds: list[float], numbers: tuple[int, int], threads: int, on: Any
) -> None:
    start, more = numbers
    assert_moments(*bucket, scale, [threads], on)
    assert_counts(*bucket, thresholds, [threads], on)
    for threshold in thresholds[:2]:
        assert_tail(*bucket, threshold, [threads], on)
    assert_square_norm(bucket[0], on)
    assert_scores(*bucket, more, [threads], on)
    assert_sample(*bucket, scale, start, start + more, on)
    assert_largest(bucket[0], on)


@pytest.mark.parametrize("shape", SHAPES)
@dtypes
def test_distributions(shape: Shape, dtype: Any) -> None:
    # More than one block of positions, and a tile that ends in one.
    n = 40_003
    buffer = shape(n).astype(dtype)
    segments = [(0, normal(n // 2, seed=1)), (n // 2 + 11, buffer[n // 2 + 11 :].copy())]
    assert_moments(segments, buffer, 0.7, [2])
    assert_moments(segments, buffer, 0.0, [2], on=CPU)
    segments, buffer = split(np.zeros(15_000, np.float16), [3, 4, 4500, 12_000], gap=2_005), buffer[:25_003]
    for block in (64, 1000, 5000, 2**62):
        assert_scores(segments, buffer, block, [1, 2, 5])
    # Every threshold is a magnitude that occurs, so that it is met exactly; held positions split the bucket.
    for threshold in (0.0, float(np.nanmedian(np.abs(buffer))), np.inf):
        assert_tail(segments, buffer, threshold, [1, 3])
    numbers = np.sort(np.abs(buffer[~np.isnan(buffer)]))
    for count in (1, 4, 5, 16):
        assert_counts(segments, buffer, numbers[np.linspace(0, len(numbers) - 1, count).astype(int)], [1, 2, 3])


@formats
@layouts
def test_formats(format_: Any, layout: Callable[[Array], Array]) -> None:
    """Parts of tiles, and tensors that begin where the device's quads do not."""
    parts = split(layered(40_000).astype(format_), [4, 20_004, 20_005, 20_517], gap=4)
    segments, buffer = [(start, layout(part)) for start, part in parts], normal(40_020, seed=1)
    on = places_of(ALL, layout)
    for dtype in REALS:
        assert_moments(segments, buffer.astype(dtype), 0.9, [2], on)
    assert_square_norm(segments, on)
    for start, stride in ((3, 7), (99, 100), (1000, 19_011), (20_004, 30_000), (39_999, 2**62), (40_000, 2**62)):
        assert_sample(segments, buffer, 0.9, start, stride, on)


def test_many_small_tensors() -> None:
    segments, buffer = [(40 * i, normal(i % 41, seed=i)) for i in range(500)], normal(20_000)
    assert_moments(segments, buffer, 0.5, [3])
    for block in (7, 64, 2048, 3000):
        assert_scores(segments, buffer, block)
    # Many positions, and many tensors, lie between two that are sampled, and between a sample and its prefetch.
    for start, stride in ((0, 1), (5, 11), (300, 301)):
        assert_sample(segments, buffer, 1.3, start, stride)


@dtypes
@pytest.mark.parametrize("size", [0, 5, 40_000])
def test_without_segments(size: int, dtype: Any) -> None:
    buffer = np.full(size, np.nan, dtype)
    for segments in ([], [(size // 2, np.zeros(0, np.float32))]):
        assert assert_moments(segments, buffer, 2.0, [2]) == Moments(0, 0.0, 0.0, 0.0, 0.0)
        assert assert_counts(segments, buffer, [0, 0, 0], [2]) == [0, 0, 0]
        assert assert_square_norm(segments) == assert_largest(segments) == 0
        assert not assert_scores(segments, buffer, 7).any()
        assert_same_bits(assert_sample(segments, buffer, 1.0, 0, 4), np.zeros(0, dtype))
    for backend in ONE_OF_EACH:
        assert type(backend.kernels.square_norm(backend.put(segments))) is float
    active = [(0, buffer[:3])]
    assert assert_counts(active, buffer, []) == []
    assert_same_bits(assert_sample(active, buffer, 1.0, 3, 4), np.zeros(0, dtype))


# --- accumulate_moments --------------------------------------------------------------------------------------------


def test_moments_of_many_blocks() -> None:
    """On the device, more blocks than a warp has threads."""
    n = 33 * 32_768 + 5
    assert_moments([(0, np.tile(layered(32_771), 33)[: n - 7])], np.zeros(n, np.float32), threads=[2])


@dtypes
@pytest.mark.parametrize("cuts", [[], [5, 70_001, 70_003, 250_000]])
def test_moments_are_bitwise_identical_for_every_level_and_number_of_threads(dtype: Any, cuts: list[int]) -> None:
    segments = split(layered(300_017), cuts, gap=7)
    assert_moments(segments, normal(300_100, seed=1).astype(dtype), 0.3, [1, 2, 3, 5, 64], on=CPU)


# --- count_reaching ------------------------------------------------------------------------------------------------


def test_counts_in_more_tiles_than_blocks() -> None:
    x = np.tile(layered(10_007), 10)
    assert_counts(split(x, [50_001], gap=13), np.append(x, x[:13]), [0.01, 1.0])
    assert_counts([(1, x)], np.append(x, x[:13])[1:], [0.01, 1.0])


# --- square_norm ---------------------------------------------------------------------------------------------------


def test_square_norm_of_many_tensors() -> None:
    """More tensors than warps add them up, more tiles than a warp has threads, and tensors as long as a tile."""
    lengths = [1, 2047, 2048, 2049, 70_000, 4096, *range(1, 40)]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    assert_square_norm([(start, layered(length)) for start, length in zip(starts, lengths, strict=True)])


# --- block_scores --------------------------------------------------------------------------------------------------


def test_scores_of_one_long_block() -> None:
    """On the device, more tiles than a warp has threads."""
    assert_scores([(5, np.zeros(70_000, np.float32))], layered(70_011), 70_011)


# --- largest -------------------------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("layout", [as_given, every_third, reversed_, odd_address])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_single_nonfinite_number_is_found(format_: Any, layout: Callable[[Array], Array], bad: float) -> None:
    """At any position: between tiles, before the device's first 16 bytes, and after the last."""
    x = normal(9_000).astype(format_)
    x[:2] = [-ml_dtypes.finfo(format_).max, ml_dtypes.finfo(format_).tiny]
    on = places_of(ONE_OF_EACH, layout)
    assert assert_largest([(0, layout(x)), (9_000, x)], on) == float(ml_dtypes.finfo(format_).max)
    for lead, at in ((0, 0), (0, 4095), (0, 4096), (0, 8_999), (1, 1), (3, 3), (5, 8_998), (1, 15), (7, 4_103)):
        y = x.copy()
        y[at] = bad
        for backend in on:
            whole = backend.put(layout(y))
            assert backend.kernels.largest([(0, backend.put(x)), (9_000, whole[lead:])]) == np.inf


def test_memory_next_to_a_tensor_is_not_read() -> None:
    for backend in ONE_OF_EACH:
        x = backend.put(np.array([np.nan, 1, 2, 3, 4, 5, 6, np.inf], np.float32))
        largest = backend.kernels.largest
        assert largest([(0, x[1:4]), (3, x[4:7])]) == 6
        assert largest([]) == 0
        assert largest([(0, x[:0])]) == 0
        assert largest([(0, x[1:4]), (3, x[4:])]) == np.inf
