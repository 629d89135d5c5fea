"""Accumulation and selection on the device against the NumPy reference: the same bits, and nothing waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import pytest
import reference
from devices import on_device, segments_on_device, to_host, waits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import FORMATS, REALS, SCALES, SHAPES, Array, assert_same_bits, buckets, layered, normal, sparse_vectors

from horovod_sparse.kernels import cuda, kernels_for
from horovod_sparse.kernels.cuda import selection as module

_EXAMPLES = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples small buckets, too."""
    monkeypatch.setattr(module, "_ALL_ARE_CANDIDATES", 0)
    monkeypatch.setattr(module, "_PER_STRATUM", 4)


def assert_takes(name: str, segments: list[tuple[int, Array]], buffer: Array, *how: float, wait: int = 0) -> None:
    """A kernel moves the same entries out as its reference, and leaves the same."""
    expected = buffer.copy()
    expected_indices, expected_values = getattr(reference, name)(segments, expected, *how)
    ours, given_ = on_device(buffer), segments_on_device(segments)
    with waits(wait):
        indices, values = getattr(cuda, name)(given_, ours, *how)
    assert_same_bits(to_host(indices), expected_indices)
    assert_same_bits(to_host(values), expected_values)
    assert_same_bits(to_host(ours), expected)


def assert_select(segments: list[tuple[int, Array]], buffer: Array, k: int, scale: float) -> None:
    assert_takes("select", segments, buffer, k, scale)


def test_the_device_has_its_kernels() -> None:
    assert kernels_for(cupy.empty(0, np.float32)) is cuda


# --- select --------------------------------------------------------------------------------------------------------


@_EXAMPLES
@given(bucket=buckets(), k=st.integers(0, 320), scale=SCALES)
def test_select_small(bucket: Any, k: int, scale: float) -> None:
    assert_select(*bucket, k, scale)


@_EXAMPLES
@given(bucket=buckets(), share=st.floats(0, 1), scale=SCALES)
def test_select_small_with_a_sample(sampling: None, bucket: Any, share: float, scale: float) -> None:
    k = round(share * sum(len(gradient) for _, gradient in bucket[0]))
    assert_select(*bucket, k, scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
def test_select_distributions(sampling: None, shape: Callable[[int], Array], dtype: Any, density: float) -> None:
    n = 10_003
    buffer = shape(n).astype(dtype)
    segments = [(0, normal(n // 2, seed=1) * buffer[: n // 2].astype(np.float32)), (n // 2 + 11, buffer[n // 2 + 11 :])]
    assert_select(segments, buffer, round(density * n), 1.0)


@pytest.mark.parametrize("density", [0.0002, 0.01, 0.1])
def test_select_many_elements(density: float) -> None:
    n = 200_017
    assert_select([(0, layered(n))], normal(n, seed=1), round(density * n), 0.7)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("real", REALS, ids=str)
def test_select_formats(format_: Any, real: Any) -> None:
    """Whole tiles inside a tensor take a fast way, which needs aligned quads; others do not."""
    parts = np.split(normal(30_000).astype(format_), [4, 20_004, 20_005])
    starts = np.cumsum([0, *map(len, parts[:-1])]) + 4 * np.arange(4)
    segments = [(int(start), part) for start, part in zip(starts, parts, strict=True)]
    assert_select(segments, normal(30_020, seed=1).astype(real), 600, 0.9)


def test_select_many_small_tensors() -> None:
    segments = [(40 * i, normal(i % 41, seed=i)) for i in range(1500)]
    assert_select(segments, normal(60_000), 500, 1.0)


@pytest.mark.parametrize("lead", [1, 4])
def test_select_in_a_part_of_an_array(lead: int) -> None:
    """A buffer that begins at an address of its element's size only."""
    whole, gradient = on_device(normal(20_000)), on_device(normal(20_000, seed=1))
    expected = normal(20_000)
    wanted = reference.select([(0, normal(20_000, seed=1)[lead:])], expected[lead:], 100, 1.0)
    indices, values = cuda.select([(0, gradient[lead:])], whole[lead:], 100)
    assert_same_bits(to_host(indices), wanted[0])
    assert_same_bits(to_host(values), wanted[1])
    assert_same_bits(to_host(whole), expected)


@pytest.mark.parametrize("room", [0, 100, 799, 800, 801])
@pytest.mark.parametrize("real", REALS, ids=str)
@pytest.mark.parametrize("strata", [0, 128])
def test_select_without_room_for_the_candidates(
    monkeypatch: pytest.MonkeyPatch, room: int, real: Any, strata: int
) -> None:
    """With too little room the whole buffer is searched."""
    monkeypatch.setattr(module._Sample, "of", lambda active, k: module._Sample(strata, 30, 5, room))
    buffer = normal(9000, seed=1).astype(real)
    assert_select([(5, normal(8000)), (8100, normal(100))], buffer, 800, 1.0)


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("real", REALS, ids=str)
def test_select_with_a_sample_that_misleads(monkeypatch: pytest.MonkeyPatch, rank: int, real: Any) -> None:
    """A threshold that fewer than k reach."""
    monkeypatch.setattr(module._Sample, "of", lambda active, k: module._Sample(256, rank, 0, active))
    assert_select([(5, normal(8000))], normal(8100, seed=1).astype(real), 800, 1.0)


def test_select_far_above_the_expected_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """The k-th key lies in the last bin of the candidates' histogram, which has no upper end."""
    monkeypatch.setattr(module._Sample, "of", lambda active, k: module._Sample(256, 200, 190, active))
    assert_select([(0, normal(8000))], normal(8000, seed=1), 10, 1.0)


def test_room_is_little_more_than_k() -> None:
    """Candidates and result together are less than 5 % of a residual, from 16M elements on."""
    for active in (2**24, 25_600_000, 110_000_000, 336_000_000):
        for density in (0.001, 0.01):
            k = round(density * active)
            room = module._Sample.of(active, k).room
            statuses = 8 * (active / 4096 + active / 1024)
            assert 8 * (room + k) + statuses < 0.05 * 4 * active


@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01])
@pytest.mark.parametrize("shape", [normal, layered])
def test_samples_suffice(density: float, shape: Callable[[int], Array]) -> None:
    """Neither too few candidates nor too many, for magnitudes like those of gradients."""
    n = 1_000_000
    k = round(density * n)
    x = shape(n)
    gradient, buffer = on_device(x), cupy.zeros(n, np.float32)
    sample = module._Sample.of(n, k)
    selection = module._Selection(module.Table([(0, gradient)], n), buffer, sample.room)
    selection.estimate(np.float32(1), sample)
    threshold = to_host(selection._plan[16:20]).view(np.int32)[0]
    found = int((reference.magnitude(x) >= threshold).sum())
    assert k <= found <= sample.room


# --- select_above and cut ------------------------------------------------------------------------------------------


@_EXAMPLES
@given(bucket=buckets(), threshold=st.sampled_from([0.0, 1e-45, 0.5, 1.0, 3.0, 1e30, np.inf]), scale=SCALES)
def test_select_above(bucket: Any, threshold: float, scale: float) -> None:
    assert_takes("select_above", *bucket, threshold, scale, wait=1)


@pytest.mark.parametrize("real", REALS, ids=str)
@pytest.mark.parametrize("threshold", [0.0, 0.7, 2.5])
def test_select_above_more_than_expected(real: Any, threshold: float) -> None:
    segments, buffer = [(0, normal(50_000)), (50_100, normal(5000))], normal(60_000, seed=1).astype(real)
    assert_takes("select_above", segments, buffer, threshold, wait=1)


@_EXAMPLES
@given(data=st.data(), dtype=st.sampled_from(REALS), k=st.integers(0, 45))
def test_cut(data: st.DataObject, dtype: Any, k: int) -> None:
    indices, values = data.draw(sparse_vectors(1000, dtype))
    expected = reference.cut(indices, values, k)
    given_ = on_device(indices), on_device(values)
    with waits(0):
        parts = cuda.cut(*given_, k)
    for ours, wanted in zip(parts, expected, strict=True):
        assert_same_bits(to_host(ours[0]), wanted[0])
        assert_same_bits(to_host(ours[1]), wanted[1])


@pytest.mark.parametrize("k", [1, 5000, 19_999, 20_000])
def test_cut_of_many(k: int) -> None:
    indices, values = np.arange(20_000, dtype=np.int32) * 3, np.round(normal(20_000) * 50)
    for ours, wanted in zip(
        cuda.cut(on_device(indices), on_device(values), k), reference.cut(indices, values, k), strict=True
    ):
        assert_same_bits(to_host(ours[0]), wanted[0])
        assert_same_bits(to_host(ours[1]), wanted[1])


# --- take ----------------------------------------------------------------------------------------------------------


@_EXAMPLES
@given(bucket=buckets(), data=st.data(), all_=st.booleans())
def test_take(bucket: Any, data: st.DataObject, all_: bool) -> None:
    segments, buffer = bucket
    positions = None if all_ else data.draw(sparse_vectors(len(buffer), np.dtype(np.float32)))[0]
    expected, ours, given_ = buffer.copy(), on_device(buffer), segments_on_device(segments)
    there = None if positions is None else on_device(positions)
    with waits(0):
        values = cuda.take(given_, ours, there)
    assert_same_bits(to_host(values), reference.take(segments, expected, positions))
    assert_same_bits(to_host(ours), expected)


# --- accumulate ----------------------------------------------------------------------------------------------------


@_EXAMPLES
@given(bucket=buckets(), scale=SCALES)
def test_accumulate(bucket: Any, scale: float) -> None:
    segments, buffer = bucket
    expected = buffer.copy()
    reference.accumulate(segments, expected, scale)
    ours, given_ = on_device(buffer), segments_on_device(segments)
    with waits(0):
        cuda.accumulate(given_, ours, scale)
    assert_same_bits(to_host(ours), expected)


@pytest.mark.parametrize("format_", FORMATS[1:3], ids=str)
@pytest.mark.parametrize("real", REALS, ids=str)
def test_every_16_bit_number_widens(format_: Any, real: Any) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(format_)
    buffer = cupy.empty(2**16, real)
    cuda.accumulate([(0, on_device(every))], buffer, scale=0.0)
    assert_same_bits(to_host(buffer), real.type(0) + every.astype(real))


@pytest.mark.parametrize("scale", [1.0, 0.0, 1 / 3])
def test_accumulate_rounds_product_and_sum_separately(scale: float) -> None:
    ours, expected = on_device(normal(20_001)), normal(20_001)
    cuda.accumulate([(0, on_device(normal(20_001, seed=1)))], ours, scale)
    reference.accumulate([(0, normal(20_001, seed=1))], expected, scale)
    assert_same_bits(to_host(ours), expected)


# --- bad input -----------------------------------------------------------------------------------------------------

N = 100


def bad_calls() -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    zeros, ones = cupy.zeros, cupy.ones
    buffer, gradient = zeros(N, np.float32), ones(N, np.float32)
    odd = zeros(4 * N + 1, np.uint8)[1:].view(np.float32)
    return {
        "host buffer": (TypeError, "CuPy", lambda: cuda.accumulate([(0, gradient)], np.zeros(N, np.float32))),
        "host gradient": (TypeError, "CuPy", lambda: cuda.accumulate([(0, np.ones(N, np.float32))], buffer)),
        "dtype": (ValueError, "int32", lambda: cuda.accumulate([(0, gradient)], zeros(N, np.int32))),
        "gradient's dtype": (ValueError, "int32", lambda: cuda.accumulate([(0, ones(N, np.int32))], buffer)),
        "overlap": (ValueError, "behind 100", lambda: cuda.accumulate([(0, gradient), (50, gradient)], buffer)),
        "outside": (ValueError, "inside 100", lambda: cuda.select([(1, gradient)], buffer, 3)),
        "strided buffer": (ValueError, "contiguous", lambda: cuda.select([], zeros(2 * N, np.float32)[::2], 3)),
        "flat": (ValueError, "flat", lambda: cuda.select([], zeros((10, 10), np.float32), 3)),
        "negative k": (ValueError, "-1", lambda: cuda.select([(0, gradient)], buffer, -1)),
        "odd address": (ValueError, "aligned", lambda: cuda.select([(0, odd)], buffer, 3)),
        "scale": (ValueError, "nan", lambda: cuda.select([(0, gradient)], buffer, 1, float("nan"))),
        "threshold": (ValueError, "-0.5", lambda: cuda.select_above([(0, gradient)], buffer, -0.5)),
        "nan threshold": (ValueError, "nan", lambda: cuda.select_above([(0, gradient)], buffer, float("nan"))),
        "counts": (ValueError, "indices", lambda: cuda.cut(zeros(3, np.int32), zeros(4, np.float32), 1)),
        "indices": (ValueError, "int32", lambda: cuda.cut(zeros(3, np.int64), zeros(3, np.float32), 1)),
    }


@pytest.mark.parametrize("name", list(bad_calls()))
def test_bad_input_is_refused(name: str) -> None:
    error, text, call = bad_calls()[name]
    with pytest.raises(error, match=text):
        call()


def test_gradients_that_are_not_contiguous_are_copied() -> None:
    wide, ours, expected = on_device(normal(3000)), on_device(normal(1000, seed=1)), normal(1000, seed=1)
    cuda.accumulate([(0, wide[::3])], ours)
    reference.accumulate([(0, normal(3000)[::3])], expected)
    assert_same_bits(to_host(ours), expected)
