"""Moments, counts, norms, scores and samples on the device against the NumPy reference: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import cupy
import numpy as np
import pytest
import reference
from devices import on_device, segments_on_device, to_host, waits
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FORMATS, REALS, SCALES, SHAPES, Array, assert_same_bits, buckets, layered, normal

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import cuda
from horovod_sparse.kernels.types import Moments
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import StableTopK

_EXAMPLES = settings(max_examples=40, deadline=None)
THRESHOLDS = [0.0, -0.0, 5e-324, 1e-45, 0.3, 1.0, 2.0, 65504.0, 3.4e38, 1e300, np.inf]
Segments = list[tuple[int, Array]]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def split(x: Array, cuts: list[int], gap: int) -> Segments:
    """Segments that cover x between the cuts, with a gap of held positions in front of each but the first."""
    bounds = pairwise([0, *cuts, len(x)])
    return [(start + gap * i, x[start:stop]) for i, (start, stop) in enumerate(bounds)]


# Parts of tiles, and tensors that begin where quads do not.
CUTS = [4, 20_004, 20_005, 20_517]


# --- accumulate_moments --------------------------------------------------------------------------------------------


def assert_moments(segments: Segments, buffer: Array, scale: float = 1.0) -> Moments:
    expected = buffer.copy()
    wanted = reference.accumulate_moments(segments, expected, scale)
    ours, given_ = on_device(buffer), segments_on_device(segments)
    with waits(1 if wanted[0] else 0):
        moments = cuda.accumulate_moments(given_, ours, scale)
    assert [type(one) for one in moments] == [int, float, float, float, float]
    assert_same_bits(np.array(moments), np.array(wanted))
    assert_same_bits(to_host(ours), expected)
    return moments


@_EXAMPLES
@given(bucket=buckets(), scale=SCALES)
def test_moments_of_small_buckets(bucket: Any, scale: float) -> None:
    assert_moments(*bucket, scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_moments_of_distributions(shape: Callable[[int], Array], dtype: Any) -> None:
    """More than one block of positions, and a tile that ends in one."""
    n = 40_003
    buffer = shape(n).astype(dtype)
    assert_moments([(0, normal(n // 2, seed=1)), (n // 2 + 11, buffer[n // 2 + 11 :].copy())], buffer, 0.7)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("real", REALS, ids=str)
@pytest.mark.parametrize("scale", [0.0, 0.9])
def test_moments_of_formats(format_: Any, real: Any, scale: float) -> None:
    segments = split(layered(40_000).astype(format_), CUTS, gap=4)
    assert_moments(segments, normal(40_020, seed=1).astype(real), scale)


def test_moments_of_many_small_tensors() -> None:
    segments = [(40 * i, normal(i % 41, seed=i)) for i in range(1000)]
    assert_moments(segments, normal(40_000), 0.5)


def test_moments_of_many_blocks() -> None:
    """More blocks than a warp has threads."""
    n = 33 * 32_768 + 5
    assert_moments([(0, np.tile(layered(32_771), 33)[: n - 7])], np.zeros(n, np.float32))


@pytest.mark.parametrize("size", [0, 5, 40_000])
def test_without_segments_the_moments_are_zero(size: int) -> None:
    ours = on_device(np.full(size, 3, np.float32))
    assert cuda.accumulate_moments([(0, ours[:0])], ours, 2.0) == Moments(0, 0.0, 0.0, 0.0, 0.0)
    assert to_host(ours).tolist() == [6] * size


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("at", [0, 7, 2999])
def test_one_nan_makes_every_moment_nan(dtype: Any, at: int) -> None:
    gradient = np.tile([1.0, np.inf, 2.0], 1000).astype(dtype)
    gradient[at] = np.nan
    assert np.isnan(assert_moments([(0, gradient)], np.zeros(3000, dtype))[1:]).all()


# --- count_reaching ------------------------------------------------------------------------------------------------


def assert_counts(segments: Segments, buffer: Array, thresholds: list[float]) -> None:
    asked = np.array(thresholds, np.float64)
    ours, given_ = on_device(buffer), segments_on_device(segments)
    with waits(1 if len(asked) and sum(len(part) for _, part in segments) else 0):
        counts = cuda.count_reaching(given_, ours, asked)
    assert isinstance(counts, np.ndarray)
    assert counts.dtype == np.int64
    np.testing.assert_array_equal(counts, reference.count_reaching(segments, buffer, asked))


@_EXAMPLES
@given(bucket=buckets(), thresholds=st.lists(st.sampled_from(THRESHOLDS) | st.floats(0, 10), max_size=16))
def test_counts_of_small_buckets(bucket: Any, thresholds: list[float]) -> None:
    assert_counts(*bucket, thresholds)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("count", [1, 4, 5, 16])
def test_counts_of_distributions(shape: Callable[[int], Array], dtype: Any, count: int) -> None:
    """Every threshold is a magnitude that occurs, so that it is met exactly; held positions split the bucket."""
    buffer = shape(20_003).astype(dtype)
    numbers = np.sort(np.abs(buffer[~np.isnan(buffer)]))
    thresholds = numbers[np.linspace(0, len(numbers) - 1, count).astype(int)].tolist()
    assert_counts(split(np.zeros(15_000, np.float16), [3, 9_000], gap=2_000), buffer, thresholds)


def test_counts_in_more_tiles_than_blocks() -> None:
    x = np.tile(layered(10_007), 10)
    assert_counts(split(x, [50_001], gap=13), np.append(x, x[:13]), [0.01, 1.0])
    assert_counts([(1, x)], np.append(x, x[:13])[1:], [0.01, 1.0])


# --- norms and scores ----------------------------------------------------------------------------------------------


def assert_square_norm(segments: Segments) -> None:
    given_ = segments_on_device(segments)
    with waits(1 if sum(len(part) for _, part in segments) else 0):
        norm = cuda.square_norm(given_)
    assert type(norm) is float
    assert_same_bits(np.float64(norm), np.float64(reference.square_norm(segments)))


@_EXAMPLES
@given(bucket=buckets())
def test_square_norms_of_small_buckets(bucket: Any) -> None:
    assert_square_norm(bucket[0])


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_square_norms_of_formats(format_: Any) -> None:
    assert_square_norm(split(layered(40_000).astype(format_), CUTS, gap=3))


def test_square_norm_of_many_tensors() -> None:
    """More tensors than warps add them up, more tiles than a warp has threads, and tensors as long as a tile."""
    lengths = [1, 2047, 2048, 2049, 70_000, 4096, *range(1, 40)]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    assert_square_norm([(start, layered(length)) for start, length in zip(starts, lengths, strict=True)])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_square_norm_of_what_is_not_finite(bad: float) -> None:
    gradient = normal(5000)
    gradient[4321] = bad
    assert_square_norm([(3, gradient)])


def assert_scores(segments: Segments, buffer: Array, block: int) -> None:
    ours, given_ = on_device(buffer), segments_on_device(segments)
    with waits(0):
        scores = cuda.block_scores(given_, ours, block)
    assert_same_bits(to_host(scores), reference.block_scores(segments, buffer, block))


@_EXAMPLES
@given(bucket=buckets(), block=st.integers(1, 400))
def test_scores_of_small_buckets(bucket: Any, block: int) -> None:
    assert_scores(*bucket, block)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("block", [64, 1000, 5000, 2**62])
def test_scores_of_distributions(shape: Callable[[int], Array], dtype: Any, block: int) -> None:
    segments = split(np.zeros(15_000, np.float16), [3, 4, 4500, 12_000], gap=2_005)
    assert_scores(segments, shape(25_003).astype(dtype), block)


def test_scores_between_many_small_tensors() -> None:
    segments = [(40 * i, normal(i % 41, seed=i)) for i in range(500)]
    for block in (7, 64, 2048, 3000):
        assert_scores(segments, normal(20_000), block)


def test_scores_of_one_long_block() -> None:
    """More tiles than a warp has threads."""
    assert_scores([(5, np.zeros(70_000, np.float32))], layered(70_011), 70_011)


@pytest.mark.parametrize("settled", [False, True])
def test_an_accumulator_on_the_device(settled: bool) -> None:
    """What was added up already counts like what is pending; its zeros make more tensors of it."""
    segments, buffer = [(3, normal(70_000)), (70_100, normal(500, seed=1))], normal(71_000, seed=2)
    expected = buffer.copy()
    accumulator = Accumulator(on_device(buffer), segments_on_device(segments), 0.5)
    sample = reference.sample(segments, buffer, 0.5, 7, 100)
    reference.accumulate(segments, expected, 0.5)
    if settled:
        accumulator.settle()
        segments = [
            (start + i, part[i : i + 2**16] * 0) for start, part in segments for i in range(0, len(part), 2**16)
        ]
    assert_same_bits(to_host(accumulator.sample(7, 100)), sample)
    moments = accumulator.moments()
    wanted = reference.accumulate_moments(segments, expected if settled else buffer, 1.0 if settled else 0.5)
    assert_same_bits(np.array(moments), np.array(wanted))
    counts = reference.count_reaching(segments, expected, np.array([2.0, 0.5])).tolist()
    assert accumulator.count_reaching([2.0, 0.5]) == counts
    assert_same_bits(to_host(accumulator.block_scores(64)), reference.block_scores(segments, expected, 64))
    assert_same_bits(to_host(accumulator.buffer), expected)


def test_stable_top_k_takes_the_same_on_both_devices() -> None:
    """The scores are agreed upon on the host."""
    size, block, k = 3001, 64, 600
    gradients, seen = [normal(size, seed=step) for step in range(3)], []
    sparsifier = StableTopK(Place(size, on_device(np.zeros(0, np.float32))), block=block, refresh=2)
    residual, expected = on_device(np.zeros(size, np.float32)), np.zeros(size, np.float32)
    for step, gradient in enumerate(gradients):
        accumulator = Accumulator(residual, [(0, on_device(gradient))])
        vector = sparsifier.take(accumulator, k, lambda array: seen.append(array) or array)  # type: ignore[func-returns-value]
        reference.accumulate([(0, gradient)], expected)
        if step % 2 == 0:
            scores = reference.block_scores([(0, expected)], expected, block)
            assert_same_bits(seen[-1], scores)
            blocks = np.sort(np.argsort(-scores, kind="stable")[: k // block])
            positions = (blocks[:, None] * block + np.arange(block)).ravel()
            positions = positions[positions < size]
        assert_same_bits(to_host(vector.indices), positions.astype(np.int32))
        assert_same_bits(to_host(vector.values), expected[positions])
        expected[positions] = 0
        assert_same_bits(to_host(residual), expected)
    assert len(seen) == 2
    state = sparsifier.state_dict()
    sparsifier.load_state_dict({**state, "blocks": to_host(state["blocks"])})


# --- samples -------------------------------------------------------------------------------------------------------


def assert_sample(segments: Segments, buffer: Array, scale: float, start: int, stride: int) -> None:
    ours, given_ = on_device(buffer), segments_on_device(segments)
    with waits(0):
        values = cuda.sample(given_, ours, scale, start, stride)
    assert_same_bits(to_host(values), reference.sample(segments, buffer, scale, start, stride))
    assert_same_bits(to_host(ours), buffer)


@_EXAMPLES
@given(bucket=buckets(), scale=SCALES, numbers=st.tuples(st.integers(0, 400), st.integers(0, 400)))
def test_samples_of_small_buckets(bucket: Any, scale: float, numbers: tuple[int, int]) -> None:
    start, behind = numbers
    assert_sample(*bucket, scale, start, start + 1 + behind)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_samples_of_formats(format_: Any) -> None:
    segments = split(normal(40_000).astype(format_), CUTS, gap=3)
    for start, stride in ((3, 7), (99, 100), (20_004, 30_000), (39_999, 2**62), (40_000, 2**62)):
        assert_sample(segments, normal(40_020, seed=1), 0.9, start, stride)


# --- all_finite ----------------------------------------------------------------------------------------------------


def assert_finite(segments: Segments) -> None:
    given_ = segments_on_device(segments)
    with waits(1 if sum(len(part) for _, part in segments) else 0):
        finite = cuda.all_finite(given_)
    assert finite is reference.all_finite(segments)


@_EXAMPLES
@given(bucket=buckets())
def test_finite_small_buckets(bucket: Any) -> None:
    assert_finite(bucket[0])


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_number_that_is_not_finite_is_found(format_: Any, bad: float) -> None:
    """Wherever it is: between multiples of 16 bytes, in front of the first and behind the last."""
    x = np.full(9_000, np.finfo(np.float16).max).astype(format_)
    assert_finite([(0, x)])
    for lead, at in ((0, 0), (0, 8_999), (1, 1), (3, 3), (3, 4_099), (5, 8_998), (1, 15), (7, 4_103)):
        x[at] = bad
        assert not cuda.all_finite([(9, on_device(normal(100))), (200, on_device(x)[lead:])])
        x[at] = 1


def test_what_is_beside_a_tensor_does_not_matter() -> None:
    x = on_device(np.array([np.nan, 1, 2, 3, 4, 5, 6, np.inf], np.float32))
    assert cuda.all_finite([(0, x[1:4]), (3, x[4:7])])
    assert cuda.all_finite([])
    assert cuda.all_finite([(0, x[:0])])
    assert not cuda.all_finite([(0, x[1:4]), (3, x[4:])])


# --- refused input -------------------------------------------------------------------------------------------------


def refused() -> dict[str, tuple[Callable[[], Any], str]]:
    f32, one = cupy.zeros(8, np.float32), np.ones(1)
    overlap = [(0, f32[:4]), (3, f32[:4])]
    return {
        "scale": (lambda: cuda.accumulate_moments([], f32, np.inf), "scale must be finite, not inf"),
        "strided": (lambda: cuda.accumulate_moments([], f32[::2]), "buffer: expected a contiguous"),
        "float16": (lambda: cuda.accumulate_moments([], f32.astype(np.float16)), "buffer: dtype float16"),
        "overlap": (lambda: cuda.accumulate_moments(overlap, f32), "segment 1: positions 3 .. 7"),
        "behind": (lambda: cuda.accumulate_moments([(5, f32[:4])], f32), "segment 0: positions 5 .. 9"),
        "count strided": (lambda: cuda.count_reaching([], f32[::2], one), "buffer: expected a contiguous"),
        "count overlap": (lambda: cuda.count_reaching(overlap, f32, one), "segment 1: positions 3 .. 7"),
        "negative": (lambda: cuda.count_reaching([], f32, -1.5 * one), "thresholds must be 0 or more, not -1.5"),
        "NaN": (lambda: cuda.count_reaching([], f32, np.array([1, np.nan])), "thresholds must be 0 or more, not nan"),
        "too many": (lambda: cuda.count_reaching([], f32, np.ones(17)), "thresholds: 17, but at most 16 at a time"),
        "float32": (lambda: cuda.count_reaching([], f32, np.ones(1, np.float32)), "thresholds: dtype float32"),
        "2-D": (lambda: cuda.count_reaching([], f32, np.ones((2, 2))), "thresholds: expected one dimension, not 2"),
        "norm of integers": (lambda: cuda.square_norm([(0, cupy.arange(3))]), "segment 0: dtype int64"),
        "norm overlap": (lambda: cuda.square_norm(overlap), "segment 1: positions 3 .. 7"),
        "finite integers": (lambda: cuda.all_finite([(0, cupy.arange(3))]), "segment 0: dtype int64"),
        "block": (lambda: cuda.block_scores([], f32, 0), "block must be 1 or more, not 0"),
        "scores overlap": (lambda: cuda.block_scores(overlap, f32, 4), "segment 1: positions 3 .. 7"),
        "stride": (lambda: cuda.sample([], f32, 1.0, 0, 0), "stride must be 1 or more, not 0"),
        "start": (lambda: cuda.sample([], f32, 1.0, -1, 3), "start must be 0 or more and below the stride, 3, not -1"),
        "late start": (lambda: cuda.sample([], f32, 1.0, 3, 3), "start must be 0 or more and below the stride, 3"),
        "sample scale": (lambda: cuda.sample([], f32, np.nan, 0, 1), "scale must be finite, not nan"),
    }


@pytest.mark.parametrize("name", list(refused()))
def test_bad_input_is_refused(name: str) -> None:
    call, message = refused()[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_only_arrays_of_the_device() -> None:
    host, device = np.zeros(8, np.float32), cupy.zeros(8, np.float32)
    for call in (
        lambda: cuda.accumulate_moments([], host),
        lambda: cuda.accumulate_moments([(0, host)], device),
        lambda: cuda.count_reaching([], device, cupy.ones(1)),
        lambda: cuda.count_reaching([], device, [1.0]),
        lambda: cuda.square_norm([(0, host)]),
        lambda: cuda.all_finite([(0, host)]),
        lambda: cuda.block_scores([], host, 4),
        lambda: cuda.sample([], host, 1.0, 0, 1),
    ):
        with pytest.raises(TypeError, match=r"expected a (CuPy|NumPy) array"):
            call()
