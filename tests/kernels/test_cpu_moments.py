"""accumulate_moments, count_reaching, square_norm and sample: what the NumPy reference computes, at every level."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from inputs import (
    FORMATS,
    LAYOUTS,
    REALS,
    SCALES,
    SHAPES,
    Array,
    assert_same_bits,
    buckets,
    layered,
    normal,
    read_only,
    supported_levels,
)

from horovod_sparse.kernels import cpu
from horovod_sparse.kernels.types import Moments

THRESHOLDS = [0.0, -0.0, 5e-324, 1e-45, 0.3, 1.0, 1.5, 2.0, 3.0, 65504.0, 3.4e38, 1e300, np.inf]
# Far above what float64 loses over these sizes, far below what a lost or repeated element makes.
PRECISION = 1e-13


def assert_near(ours: float, expected: Any, terms: Any) -> None:
    """Equal up to the rounding of float64 sums of terms with this sum of magnitudes."""
    np.testing.assert_allclose(ours, np.float64(expected), rtol=0, atol=PRECISION * float(terms) + 1e-300)


def assert_moments(segments: list[tuple[int, Array]], buffer: Array, scale: float = 1.0, threads: int = 1) -> Moments:
    ours, expected = buffer.copy(), buffer.copy()
    moments = cpu.accumulate_moments(segments, ours, scale, threads)
    assert_same_bits(np.array(moments), np.array(reference.accumulate_moments(segments, expected, scale)))
    assert_same_bits(ours, expected)
    count, total, squares, magnitudes, largest = reference.exact_moments(segments, expected)
    assert moments.count == count
    finite = bool(np.isfinite(magnitudes))
    assert_near(moments.sum, total, magnitudes if finite else 0)
    assert_near(moments.squares, squares, squares if finite else 0)
    assert_near(moments.magnitudes, magnitudes, magnitudes if finite else 0)
    np.testing.assert_array_equal(moments.largest, np.float64(largest))
    return moments


def split(x: Array, cuts: list[int], gap: int) -> list[tuple[int, Array]]:
    """Segments that cover x between the cuts, with a gap of held positions in front of each but the first."""
    bounds = pairwise([0, *cuts, len(x)])
    return [(start + gap * i, x[start:stop]) for i, (start, stop) in enumerate(bounds)]


# --- accumulate_moments --------------------------------------------------------------------------------------------


@given(bucket=buckets(), scale=SCALES, threads=st.integers(1, 3))
def test_moments_of_small_buckets(level: str, bucket: Any, scale: float, threads: int) -> None:
    assert_moments(*bucket, scale, threads)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("scale", [0.0, 0.7])
def test_moments_of_distributions(level: str, shape: Callable[[int], Array], dtype: Any, scale: float) -> None:
    n = 100_003
    buffer = shape(n).astype(dtype)
    segments = [(0, normal(n // 2, seed=1)), (n // 2 + 11, buffer[n // 2 + 11 :].copy())]
    assert_moments(segments, buffer, scale, threads=2)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_of_formats(level: str, format_: Any, layout: Callable[[Array], Array]) -> None:
    segments = split(normal(60_000).astype(format_), [10, 20_011, 20_012], gap=3)
    assert_moments([(start, layout(part)) for start, part in segments], normal(60_020, seed=1), 0.9, threads=2)


def test_moments_of_many_small_tensors(level: str) -> None:
    segments = [(40 * i, normal(i % 41, seed=i)) for i in range(1500)]
    assert_moments(segments, normal(60_000), threads=3)


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("cuts", [[], [5, 70_001, 70_003, 250_000]])
def test_bits_of_moments_depend_neither_on_level_nor_on_threads(dtype: Any, cuts: list[int]) -> None:
    segments = split(layered(300_017), cuts, gap=7)
    buffer = normal(300_100, seed=1).astype(dtype)
    moments = set()
    before = cpu.simd_level()
    for level in supported_levels():
        cpu.use_simd(level)
        moments |= {cpu.accumulate_moments(segments, buffer.copy(), 0.3, threads) for threads in (1, 2, 3, 5, 64)}
    cpu.use_simd(before)
    assert len(moments) == 1


@pytest.mark.parametrize("size", [0, 5, 100_000])
def test_without_segments_the_moments_are_zero(level: str, size: int) -> None:
    buffer = np.full(size, np.nan, np.float32)
    assert cpu.accumulate_moments([], buffer, threads=2) == Moments(0, 0.0, 0.0, 0.0, 0.0)
    assert cpu.accumulate_moments([(0, buffer[:0])], buffer) == Moments(0, 0.0, 0.0, 0.0, 0.0)


def test_held_positions_are_scaled_but_do_not_count(level: str) -> None:
    buffer = np.array([1, 1000, np.nan, 2, np.inf], np.float32)
    moments = cpu.accumulate_moments([(0, np.array([-4], np.float32)), (3, np.array([1], np.float64))], buffer, 2.0)
    assert moments == Moments(2, 3.0, 29.0, 7.0, 5.0)
    np.testing.assert_array_equal(buffer, [-2, 2000, np.nan, 5, np.inf])


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("at", [0, 7, 99])
def test_one_nan_makes_every_moment_nan(level: str, dtype: Any, at: int) -> None:
    """Even where infinities and larger numbers come before and after it."""
    gradient = np.tile([1.0, np.inf, 2.0], 34)[:100].astype(dtype)
    gradient[at] = np.nan
    assert np.isnan(cpu.accumulate_moments([(0, gradient)], np.zeros(100, dtype))[1:]).all()


def test_infinities_of_both_signs_have_magnitudes(level: str) -> None:
    moments = cpu.accumulate_moments([(0, np.array([np.inf, -np.inf, 1], np.float32))], np.zeros(3, np.float32))
    assert np.isnan(moments.sum)
    assert moments[2:] == (np.inf, np.inf, np.inf)


@pytest.mark.parametrize("size", [2.0**100, 2.0**-140])
def test_squares_are_not_those_of_float32(level: str, size: float) -> None:
    gradient = np.full(1000, -size, np.float32)
    moments = cpu.accumulate_moments([(0, gradient)], np.zeros(1000, np.float32))
    assert moments == Moments(1000, -1000 * size, 1000 * size**2, 1000 * size, size)
    assert cpu.square_norm([(0, gradient)]) == 1000 * size**2


# --- count_reaching ------------------------------------------------------------------------------------------------


def assert_counts(
    segments: list[tuple[int, Array]], buffer: Array, thresholds: list[float], threads: int = 1
) -> list[int]:
    ours = cpu.count_reaching(segments, read_only(buffer), np.array(thresholds), threads)
    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours, reference.count_reaching(segments, buffer, np.array(thresholds)))
    return ours.tolist()


@given(
    bucket=buckets(),
    thresholds=st.lists(st.sampled_from(THRESHOLDS) | st.floats(0, 10), max_size=16),
    threads=st.integers(1, 3),
)
def test_counts_of_small_buckets(level: str, bucket: Any, thresholds: list[float], threads: int) -> None:
    assert_counts(*bucket, thresholds, threads)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_counts_of_distributions(level: str, shape: Callable[[int], Array], dtype: Any) -> None:
    """Every threshold is a magnitude that occurs, so that it is met exactly; held positions split the bucket."""
    buffer = shape(100_003).astype(dtype)
    numbers = np.sort(np.abs(buffer[~np.isnan(buffer)]))
    thresholds = numbers[np.linspace(0, len(numbers) - 1, 16).astype(int)].tolist()
    segments = split(np.zeros(90_000, np.float16), [3, 50_000], gap=5_000)
    for threads in (1, 2, 3):
        assert_counts(segments, buffer, thresholds, threads)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_a_count_is_how_many_select_above_takes(level: str, dtype: Any) -> None:
    segments = split(np.zeros(50_000, dtype), [17, 30_000], gap=100)
    settled = layered(50_200).astype(dtype)
    settled[::501] = np.nan
    for threshold in THRESHOLDS:
        (count,) = cpu.count_reaching(segments, settled, np.array([threshold]))
        assert count == len(cpu.select_above(segments, settled.copy(), threshold)[0])


def test_the_values_of_the_gradients_do_not_count(level: str) -> None:
    buffer = np.arange(100, dtype=np.float32)
    gradient = np.full(50, np.nan)
    assert cpu.count_reaching([(30, gradient)], buffer, np.array([75.0, 0.0, 29.5])).tolist() == [5, 50, 50]


@pytest.mark.parametrize("size", [0, 5])
def test_without_segments_nothing_is_counted(level: str, size: int) -> None:
    buffer = np.ones(size, np.float32)
    assert cpu.count_reaching([], buffer, np.zeros(3), threads=2).tolist() == [0, 0, 0]
    assert cpu.count_reaching([(0, buffer)], buffer, np.zeros(0)).tolist() == []


def test_thresholds_are_rounded_to_the_buffer(level: str) -> None:
    """0.7 is above float32's nearest number to it, which reaches it nevertheless."""
    nearest = np.full(100, 0.7, np.float32)
    assert cpu.count_reaching([(0, nearest)], nearest, np.array([0.7])).tolist() == [100]
    assert cpu.count_reaching([(0, nearest)], nearest.astype(np.float64), np.array([0.7])).tolist() == [0]


# --- square_norm ---------------------------------------------------------------------------------------------------


def assert_square_norm(segments: list[tuple[int, Array]]) -> None:
    norm, exact = cpu.square_norm(segments), reference.exact_square_norm(segments)
    assert_same_bits(np.float64(norm), reference.square_norm(segments))
    assert_near(norm, exact, exact if np.isfinite(exact) else 0)


@given(bucket=buckets())
def test_square_norms_of_small_buckets(bucket: Any) -> None:
    assert_square_norm(bucket[0])


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_square_norms_of_formats(level: str, format_: Any, layout: Callable[[Array], Array]) -> None:
    segments = split(layered(60_000).astype(format_), [10, 20_011, 20_012], gap=3)
    assert_square_norm([(start, layout(part)) for start, part in segments])


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_bits_of_the_square_norm_do_not_depend_on_the_level(format_: Any) -> None:
    segments = split(normal(100_003).astype(format_), [5, 70_001], gap=0)
    norms = set()
    before = cpu.simd_level()
    for level in supported_levels():
        cpu.use_simd(level)
        norms.add(cpu.square_norm(segments))
    cpu.use_simd(before)
    assert len(norms) == 1


def test_square_norm_of_nothing_is_zero(level: str) -> None:
    assert cpu.square_norm([]) == 0.0
    assert cpu.square_norm([(3, np.zeros(0, np.float32))]) == 0.0


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_square_norm_of_what_is_not_finite(level: str, format_: Any) -> None:
    gradient = np.ones(5000).astype(format_)
    gradient[4321] = -np.inf
    assert cpu.square_norm([(0, gradient)]) == np.inf
    gradient[1234] = np.nan
    assert np.isnan(cpu.square_norm([(0, gradient)]))


# --- block_scores --------------------------------------------------------------------------------------------------


def assert_scores(segments: list[tuple[int, Array]], buffer: Array, block: int, threads: int = 1) -> None:
    ours = cpu.block_scores(segments, read_only(buffer), block, threads)
    assert_same_bits(ours, reference.block_scores(segments, buffer, block))


@given(bucket=buckets(), block=st.integers(1, 400), threads=st.integers(1, 3))
def test_scores_of_small_buckets(level: str, bucket: Any, block: int, threads: int) -> None:
    assert_scores(*bucket, block, threads)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("block", [64, 1000, 5000, 2**62])
def test_scores_of_distributions(level: str, shape: Callable[[int], Array], dtype: Any, block: int) -> None:
    buffer = shape(30_003).astype(dtype)
    segments = split(np.zeros(20_000, np.float16), [3, 4, 4500, 12_000], gap=2_005)
    for threads in (1, 2, 5):
        assert_scores(segments, buffer, block, threads)


def test_the_scores_of_whole_blocks_are_their_square_norms() -> None:
    buffer = layered(64 * 300)
    norms = [cpu.square_norm([(0, part)]) for part in np.split(buffer, 300)]
    assert cpu.block_scores([(0, buffer)], buffer, 64).tolist() == norms


def test_held_positions_add_nothing_to_a_score(level: str) -> None:
    buffer = np.array([1, np.nan, 2, 3, np.inf, 4, np.nan], np.float32)
    segments = [(0, buffer[:1]), (2, buffer[:2]), (5, buffer[:1])]
    assert cpu.block_scores(segments, buffer, 3).tolist() == [5, 25, 0]


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_an_empty_bucket_has_no_scores(dtype: Any) -> None:
    assert_same_bits(cpu.block_scores([], np.zeros(0, dtype), 7), np.zeros(0))


# --- sample --------------------------------------------------------------------------------------------------------


def assert_sample(segments: list[tuple[int, Array]], buffer: Array, scale: float, start: int, stride: int) -> None:
    ours = cpu.sample(segments, read_only(buffer), scale, start, stride)
    assert_same_bits(ours, reference.sample(segments, buffer, scale, start, stride))


@given(bucket=buckets(), scale=SCALES, numbers=st.tuples(st.integers(0, 400), st.integers(0, 400)))
def test_samples_of_small_buckets(bucket: Any, scale: float, numbers: tuple[int, int]) -> None:
    start, behind = numbers
    assert_sample(*bucket, scale, start, start + 1 + behind)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_of_formats(format_: Any, layout: Callable[[Array], Array]) -> None:
    segments = split(normal(60_000).astype(format_), [10, 20_011, 20_012], gap=3)
    segments = [(start, layout(part)) for start, part in segments]
    for start, stride in ((0, 1), (3, 7), (99, 100), (1000, 19_011), (20_010, 30_000)):
        assert_sample(segments, normal(60_020, seed=1), 0.9, start, stride)


def test_samples_of_many_small_tensors() -> None:
    """Many positions, and many tensors, lie between two that are sampled, and between a sample and its prefetch."""
    segments = [(40 * i, normal(i % 41, seed=i)) for i in range(1500)]
    for start, stride in ((0, 1), (5, 11), (300, 301)):
        assert_sample(segments, normal(60_000), 1.3, start, stride)


def test_the_samples_of_all_starts_are_the_sum() -> None:
    segments = split(normal(10_007), [4_000], gap=50)
    acc = normal(10_100, seed=1)
    stride = 13
    samples = [cpu.sample(segments, acc, 0.5, start, stride) for start in range(stride)]
    cpu.accumulate(segments, acc, 0.5)
    active = acc[reference.active_positions(segments)]
    for start, drawn in enumerate(samples):
        assert_same_bits(drawn, active[start::stride])


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_no_position_gives_an_empty_sample(dtype: Any) -> None:
    buffer = np.ones(5, dtype)
    for segments, start in (([], 0), ([(2, buffer[:0])], 0), ([(0, buffer[:3])], 3)):
        assert_same_bits(cpu.sample(segments, buffer, 1.0, start, 4), np.zeros(0, dtype))


# --- refused input -------------------------------------------------------------------------------------------------

F32 = np.zeros(8, np.float32)
ONE = np.ones(1)
HUGE = np.broadcast_to(np.float32(0), 2**31)  # one element, repeated: no 8 GiB
OVERLAP = [(0, F32[:4]), (3, F32[:4])]

REFUSED = {
    "scale": (lambda: cpu.accumulate_moments([], F32, np.inf), "scale must be finite, not inf"),
    "threads": (lambda: cpu.accumulate_moments([], F32, 1.0, 0), "threads must be 1 .. 1024, not 0"),
    "read-only": (lambda: cpu.accumulate_moments([], read_only(F32)), "buffer: is read-only"),
    "strided": (lambda: cpu.accumulate_moments([], F32[::2]), "buffer: must be contiguous"),
    "float16": (lambda: cpu.accumulate_moments([], F32.astype(np.float16)), "buffer: dtype float16"),
    "overlap": (lambda: cpu.accumulate_moments(OVERLAP, F32), "segment 1: starts at 3, before 4"),
    "behind": (lambda: cpu.accumulate_moments([(5, F32[:4])], F32), "segment 0: ends at 9, behind the last of 8"),
    "count threads": (lambda: cpu.count_reaching([], F32, ONE, 1025), "threads must be 1 .. 1024, not 1025"),
    "count strided": (lambda: cpu.count_reaching([], F32[::2], ONE), "buffer: must be contiguous"),
    "count integers": (lambda: cpu.count_reaching([], np.arange(3), ONE), "buffer: dtype int64"),
    "count overlap": (lambda: cpu.count_reaching(OVERLAP, F32, ONE), "segment 1: starts at 3, before 4"),
    "negative": (lambda: cpu.count_reaching([], F32, -1.5 * ONE), "thresholds must be 0 or more, not -1.5"),
    "NaN": (lambda: cpu.count_reaching([], F32, np.array([1, np.nan])), "thresholds must be 0 or more, not nan"),
    "too many": (lambda: cpu.count_reaching([], F32, np.ones(17)), "thresholds: 17, but at most 16 at a time"),
    "float32": (lambda: cpu.count_reaching([], F32, F32), "thresholds: dtype float32 is not float64"),
    "2-D": (lambda: cpu.count_reaching([], F32, np.ones((2, 2))), "thresholds: expected one dimension, not 2"),
    "strided thresholds": (lambda: cpu.count_reaching([], F32, np.ones(4)[::2]), "thresholds: must be contiguous"),
    "norm of integers": (lambda: cpu.square_norm([(0, np.arange(3))]), "segment 0: dtype int64"),
    "norm overlap": (lambda: cpu.square_norm(OVERLAP), "segment 1: starts at 3, before 4"),
    "2**31": (lambda: cpu.square_norm([(0, HUGE)]), "segment 0: 2147483648 elements"),
    "block": (lambda: cpu.block_scores([], F32, 0), "block must be 1 or more, not 0"),
    "scores threads": (lambda: cpu.block_scores([], F32, 4, 0), "threads must be 1 .. 1024, not 0"),
    "scores strided": (lambda: cpu.block_scores([], F32[::2], 4), "buffer: must be contiguous"),
    "scores overlap": (lambda: cpu.block_scores(OVERLAP, F32, 4), "segment 1: starts at 3, before 4"),
    "stride": (lambda: cpu.sample([], F32, 1.0, 0, 0), "stride must be 1 or more, not 0"),
    "start": (lambda: cpu.sample([], F32, 1.0, -1, 3), "start must be 0 or more and below the stride, 3, not -1"),
    "late start": (lambda: cpu.sample([], F32, 1.0, 3, 3), "start must be 0 or more and below the stride, 3, not 3"),
    "sample scale": (lambda: cpu.sample([], F32, np.nan, 0, 1), "scale must be finite, not nan"),
    "sample strided": (lambda: cpu.sample([], F32[::2], 1.0, 0, 1), "buffer: must be contiguous"),
    "sample overlap": (lambda: cpu.sample(OVERLAP, F32, 1.0, 0, 1), "segment 1: starts at 3, before 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
    assert not F32.any(), "refused before anything is written"


def test_only_arrays() -> None:
    with pytest.raises(TypeError, match="buffer: expected a NumPy array, not <class 'list'>"):
        cpu.accumulate_moments([], [1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="thresholds: expected a NumPy array, not <class 'list'>"):
        cpu.count_reaching([], F32, [1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="segment 0: expected a NumPy array, not <class 'list'>"):
        cpu.square_norm([(0, [1.0])])  # type: ignore[list-item]
