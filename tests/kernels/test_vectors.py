"""Sparse vectors on every backend are bitwise identical to the NumPy reference.

The CPU refuses indices that are out of bounds or do not ascend; on the device, they do no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
from backends import ALL, CPU, DEVICE, ONE_OF_EACH, SOME, OnHost, assert_parity, assert_same
from devices import on_device, to_host
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import (
    BFLOAT16,
    FORMATS,
    REALS,
    SCALES,
    SHAPES,
    Array,
    arrays,
    as_given,
    difficult,
    gradients,
    normal,
    odd_address,
    sparse_vectors,
)

from horovod_sparse.kernels import cuda
from horovod_sparse.kernels.cuda import vectors as module
from horovod_sparse.kernels.types import MAX_SIZE

Vector = tuple[Array, Array]
dtypes = pytest.mark.parametrize("dtype", REALS, ids=str)
formats = pytest.mark.parametrize("format_", FORMATS, ids=str)
EMPTY = np.zeros(0, np.int32), np.zeros(0, np.float32)


def vector(rng: np.random.Generator, low: int, high: int, count: int, dtype: Any = np.float32) -> Vector:
    """Return a vector of ``count`` entries in low .. high."""
    indices = low + np.sort(rng.choice(high - low, count, replace=False))
    return indices.astype(np.int32), rng.standard_normal(count).astype(dtype)


def some(n: int, share: float) -> Array:
    """Ascending positions below n, about this share of them."""
    return np.flatnonzero(np.random.default_rng(0).random(n) < share).astype(np.int32)


# --- add -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(size=st.integers(0, 100), dtype=st.sampled_from(REALS), data=st.data(), on=SOME)
def test_add(size: int, dtype: Any, data: st.DataObject, on: Any) -> None:
    buffer = data.draw(arrays(dtype, size))
    assert_parity("add", *data.draw(sparse_vectors(size, dtype)), buffer, on=on)
    assert_parity("add", None, buffer[::-1].copy(), buffer, on=on)


@dtypes
@pytest.mark.parametrize("share", [0.01, 0.9, None])
def test_add_to_many(share: float | None, dtype: Any) -> None:
    n = 20_001
    indices = None if share is None else some(n, share)
    values = normal(n if indices is None else len(indices)).astype(dtype)
    assert_parity("add", indices, values, normal(n, seed=1).astype(dtype))


def test_entries_outside_are_ignored() -> None:
    """On the device; arrays of the emulation are fenced."""
    indices = np.array([-(2**31), -1, 3, 0, 10, 2**31 - 1], np.int32)
    values, buffer = on_device(np.arange(1, 7, dtype=np.float32)), on_device(np.zeros(10, np.float32))
    cuda.add(on_device(indices), values, buffer)
    assert to_host(buffer).tolist() == [4, 0, 0, 3, 0, 0, 0, 0, 0, 0]
    cuda.scatter(on_device(np.sort(indices)), values, [(0, buffer)])
    assert to_host(buffer).tolist() == [3, 0, 0, 4, 0, 0, 0, 0, 0, 0]


# --- scatter -------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(data=st.data(), size=st.integers(0, 120), cleared=st.booleans(), scale=SCALES, on=SOME)
def test_scatter(data: st.DataObject, size: int, cleared: bool, scale: float, on: Any) -> None:
    dtype, layout = data.draw(st.sampled_from(REALS)), data.draw(st.sampled_from([as_given, odd_address]))
    vector = data.draw(sparse_vectors(size, dtype) | arrays(dtype, size).map(lambda values: (None, values)))
    outputs = [
        (start, layout(np.full(len(gradient), 9 * (not cleared), gradient.dtype)))
        for start, gradient in data.draw(gradients(size))
    ]
    assert_parity("scatter", *vector, outputs, scale, cleared=cleared, on=on if layout is as_given else CPU)


def test_scatter_to_more_than_the_cache_holds() -> None:
    n, indices = 3_000_017, some(3_000_017, 0.01)
    outputs = [(5, np.ones(n // 2, np.float32)), (n // 2 + 9, odd_address(np.ones(n // 3, np.float64)))]
    assert_parity("scatter", indices, normal(len(indices)), outputs, 0.25, on=CPU)


@formats
@pytest.mark.parametrize("share", [0.0, 0.01, 0.7, None])
def test_scatter_to_many(format_: Any, share: float | None) -> None:
    n = 30_000
    indices = None if share is None else some(n, share)
    values = normal(n if indices is None else len(indices))
    outputs = [(5, np.ones(9_001, format_)), (9_010, np.ones(4_096, format_)), (20_000, np.ones(10_000, format_))]
    assert_parity("scatter", indices, values, outputs, 0.25)


def test_scatter_to_many_small_tensors() -> None:
    indices = some(20_000, 0.3)
    for cleared in (False, True):
        outputs = [(40 * i, np.full(i % 41, not cleared, FORMATS[i % 4])) for i in range(500)]
        assert_parity("scatter", indices, normal(len(indices)), outputs, 3.0, cleared=cleared)
        assert_parity("scatter", None, normal(20_000), outputs, 3.0, cleared=cleared)


@pytest.mark.parametrize("lead", range(9))
def test_only_the_outputs_are_cleared(lead: int) -> None:
    """On the device, memory is cleared 16 bytes at a time, but not in front of an output, nor behind it."""
    for count in (0, 1, 5, 100, 4099):
        whole = on_device(np.ones(count + 20, np.float16))
        indices, values = on_device(np.array([1], np.int32)), on_device(np.array([3.0], np.float32))
        cuda.scatter(indices, values, [(0, whole[lead : lead + count])])
        expected = np.ones(count + 20, np.float16)
        expected[lead : lead + count] = 0
        expected[lead + 1 : lead + 2] = 3 if count > 1 else 1
        assert_same(whole, expected)


@pytest.mark.parametrize("format_", [np.dtype(np.float16), BFLOAT16], ids=str)
@dtypes
def test_scatter_rounds_to_nearest_even(format_: Any, dtype: Any) -> None:
    values = difficult(format_.name, dtype)
    assert_parity("scatter", None, values, [(0, np.ones(len(values), format_))])


def test_scatter_at_the_ends_of_int32() -> None:
    indices = np.array([0, 7, MAX_SIZE - 8, MAX_SIZE - 1], np.int32)
    assert_parity("scatter", indices, normal(4), [(0, np.ones(8, np.float32)), (MAX_SIZE - 8, np.ones(8, np.float32))])


def test_scatter_by_a_scale_beyond_the_values() -> None:
    """A scale need not be finite."""
    assert_parity("scatter", np.array([1], np.int32), np.ones(1, np.float32), [(0, np.ones(2, np.float32))], 1e300)


# --- exclude -------------------------------------------------------------------------------------------------------


def assert_excluded(indices: Array, values: Array, others: Array, on: Any = ALL) -> Any:
    waiting = int(len(indices) > 0 and len(others) > 0)
    return assert_parity("exclude", indices, values, others, waiting=waiting, on=on)


@settings(max_examples=40)
@given(data=st.data(), size=st.sampled_from([0, 1, 50, 16384, 16385, 100_000]), dtype=st.sampled_from(REALS), on=SOME)
def test_exclude(data: st.DataObject, size: int, dtype: Any, on: Any) -> None:
    """Some of the others are in the vector."""
    indices, values = data.draw(sparse_vectors(size, dtype))
    others, _ = data.draw(sparse_vectors(size, REALS[0]))
    shared = indices[data.draw(arrays(REALS[0], len(indices))) > 0]
    assert_excluded(indices, values, np.union1d(others, shared).astype(np.int32), on)


@pytest.mark.parametrize("counts", [(0, 0), (0, 100), (100, 0), (1025, 1), (20_000, 3), (3, 20_000), (10_000, 12_000)])
@pytest.mark.parametrize("spread", [1, 3, 1000, 20_000])
def test_exclude_from_many(counts: tuple[int, int], spread: int) -> None:
    rng, size = np.random.default_rng(0), max(counts) * spread + 1
    indices, others = (np.unique(rng.integers(0, size, count)).astype(np.int32) for count in counts)
    assert_excluded(indices, normal(len(indices)).astype(REALS[spread % 2]), others)


def test_exclude_at_the_ends_of_int32() -> None:
    last = 2**31 - 2
    indices, values = np.array([0, 5, last - 1, last], np.int32), np.array([np.nan, -0.0, 3.0, 4.0])
    assert assert_excluded(indices, values, np.array([5, last], np.int32))[0].tolist() == [0, last - 1]


@pytest.mark.parametrize("seed", range(3))
def test_exclude_stays_within_its_arrays(seed: int) -> None:
    """On the device, for any indices; arrays of the emulation are fenced."""
    rng = np.random.default_rng(seed)
    indices, others = (rng.integers(-(2**31), 2**31, count).astype(np.int32) for count in (3000, 2000))
    kept, _ = cuda.exclude(on_device(indices), on_device(normal(3000)), on_device(others))
    assert 0 < kept.size <= 3000


# --- merge_sum -----------------------------------------------------------------------------------------------------


def assert_merged(vectors: list[Vector], size: int, on: Any = ALL) -> Any:
    waiting = int(sum(len(indices) > 0 for indices, _ in vectors) > 1)
    return assert_parity("merge_sum", vectors, size, waiting=waiting, on=on)


@pytest.fixture(params=[(10, 10), (15, 15), (10, 15)], ids=["narrow", "wide", "as chosen"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of few positions on the device, of many, and of as many as the density suggests."""
    monkeypatch.setattr(module, "_NARROWEST", request.param[0])
    monkeypatch.setattr(module, "_WIDEST", request.param[1])


@settings(max_examples=50)
@given(
    data=st.data(),
    size=st.sampled_from([0, 1, 50, 1024, 4097, 16384, 16385, 100_000]),
    dtype=st.sampled_from(REALS),
    on=SOME,
)
def test_merge_sum(data: st.DataObject, size: int, dtype: Any, on: Any) -> None:
    assert_merged(data.draw(st.lists(sparse_vectors(size, dtype), min_size=1, max_size=6)), size, on)


@pytest.mark.parametrize("density", [0.0, 0.0001, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
@dtypes
def test_merge_sum_of_many(count: int, density: float, dtype: Any) -> None:
    rng, size = np.random.default_rng(0), 20_000
    assert_merged([vector(rng, 0, size, round(density * size) * (r != 5), dtype) for r in range(count)], size, CPU)


@pytest.mark.parametrize(("count", "size"), [(2, 40_000), (3, 40_000), (8, 8000), (21, 8000)])
def test_merge_sum_in_tiles(tiles: None, count: int, size: int) -> None:
    rng = np.random.default_rng(0)
    for dtype, density in zip([*REALS, *REALS], (0.0005, 0.02, 0.3, 1.0), strict=True):
        vectors = [vector(rng, 0, size, round(density * size) * (rank != 1), dtype) for rank in range(count)]
        assert_merged(vectors, size, DEVICE)


@pytest.mark.parametrize("counts", [(0, 0), (0, 9), (1, 1), (1, 5000), (5000, 2), (4999, 5000), (5000, 5000)])
@pytest.mark.parametrize("ranges", [(0, 0), (0, 4000), (0, 10_000), (10_000, 0)])
def test_merge_sum_of_two(counts: tuple[int, int], ranges: tuple[int, int]) -> None:
    """Vectors that are equal where they are, that overlap and that follow one another; either end is used up first."""
    rng = np.random.default_rng(0)
    for step in (1, 3):
        vectors = []
        for low, count in zip(ranges, counts, strict=True):
            vectors.append((np.arange(low, low + step * count, step, dtype=np.int32), rng.standard_normal(count)))
        assert_merged(vectors, 25_000, CPU)


@pytest.mark.parametrize(
    "counts",
    [*((size, size, size) for size in (1023, 1024, 1025, 30_000)), (1000, 1000), (1000, 999), (700, 800), (3, 1000)],
)
def test_merge_sum_in_a_full_bucket(tiles: None, counts: tuple[int, ...]) -> None:
    """The union has fewer entries than the vectors together, and at most as many as the bucket has positions."""
    rng, size = np.random.default_rng(0), max(1000, *counts)
    assert_merged([vector(rng, 0, size, count) for count in counts], size)


@pytest.mark.parametrize("ranges", [(0, 0), (0, 4000), (10_000, 0), (24_000, 24_999)])
def test_merge_sum_of_ranges(tiles: None, ranges: tuple[int, int]) -> None:
    """Most tiles have no entries."""
    rng, size = np.random.default_rng(0), 200_000
    assert_merged([vector(rng, low, low + 3000, 1500) for low in ranges], size)


@pytest.mark.parametrize("others", [0, 1], ids="{} empty vectors more".format)
def test_merge_sum_at_the_int32_limit(others: int) -> None:
    """The reference would need as much memory as the bucket has positions."""
    size = 2**31 - 1
    first = np.array([size - 40_000, size - 1], np.int32), np.array([1.0, 2.0])
    second = np.array([size - 2, size - 1], np.int32), np.array([3.0, 4.0])
    vectors = [first, second, *[(EMPTY[0], np.zeros(0))] * others]
    for backend in ALL:
        with backend.active(1) as kernels:
            merged = kernels.merge_sum(backend.put(vectors), size)
        expected = np.array([size - 40_000, size - 2, size - 1], np.int32), np.array([1.0, 3.0, 6.0])
        assert_same(merged, expected, str(backend))


@dtypes
def test_on_the_device_the_first_nan_stays_with_its_payload(dtype: Any) -> None:
    bits = np.dtype(f"u{dtype.itemsize}").type
    quiet = np.array([np.nan], dtype).view(bits)[0]
    first, second = (np.array([quiet | bits(payload)], bits).view(dtype) for payload in (5, 9))
    zero, at = np.zeros(1, dtype), on_device(np.array([3], np.int32))
    for values in ([first, second, zero], [zero, first, second], [first, zero, zero]):
        _, total = cuda.merge_sum([(at, on_device(one)) for one in values], 4)
        assert to_host(total).view(bits)[0] == quiet | bits(5)


def test_one_vector_with_entries_is_copied() -> None:
    for backend in ONE_OF_EACH:
        empty, given_ = backend.put((EMPTY[0], np.zeros(0))), backend.put((np.array([2, 5], np.int32), np.ones(2)))
        with backend.active(0) as kernels:
            sums = kernels.merge_sum([empty, given_, empty], 6)
        given_[1][...] = 0
        assert_same(sums, (np.array([2, 5], np.int32), np.ones(2)))


# --- merge_sum on the device: indices that are not what they should be ---------------------------------------------


def test_entries_outside_the_bucket_are_ignored(tiles: None) -> None:
    rng, size = np.random.default_rng(0), 5000
    wild = np.array([-(2**31), -70_000, -1, *range(0, size, 7), size, size + 1, size + 2000, 2**31 - 1])
    values, inside = normal(len(wild)), (wild >= 0) & (wild < size)
    first, last = vector(rng, 0, size, 300), vector(rng, 0, size, 300)
    ours = [DEVICE[0].put(one) for one in (first, (wild.astype(np.int32), values), last)]
    expected = reference.merge_sum([first, (wild[inside].astype(np.int32), values[inside]), last], size)
    assert_same(cuda.merge_sum(ours, size), expected)


@pytest.mark.parametrize("size", [0, 9])
def test_nothing_inside_of_the_bucket(size: int) -> None:
    outside = [np.array([-5, -2], np.int32), np.array([9, 2**31 - 1], np.int32)]
    for array in cuda.merge_sum([DEVICE[0].put((at, normal(2))) for at in outside], size):
        assert array.size == 0


@pytest.mark.parametrize("indices", ["random", "descending", "equal"])
def test_merge_sum_stays_within_its_arrays_for_any_indices(tiles: None, indices: str) -> None:
    """Arrays of the emulation are fenced."""
    rng, size, count = np.random.default_rng(0), 4000, 3000
    wild = {
        "random": rng.integers(-(2**31), 2**31, count),
        "descending": np.arange(count)[::-1],
        "equal": np.full(count, 5),
    }[indices].astype(np.int32)
    near = rng.integers(-10, size + 10, count).astype(np.int32)
    vectors = [(wild, normal(count)), (near, normal(count)), vector(rng, 0, size, 1000)]
    found = to_host(cuda.merge_sum(DEVICE[0].put(vectors), size)[0]).astype(np.int64)
    assert len(found) > 0
    assert np.all(np.diff(found) > 0)
    assert found[0] >= 0
    assert found[-1] < size


# --- count_magnitudes ----------------------------------------------------------------------------------------------


def width_of(dtype: Any) -> int:
    return 8 * np.dtype(dtype).itemsize - 1


def assert_counted(values: Array, prefix: int, shift: int, bits: int, on: Any = ALL) -> Any:
    return assert_parity("count_magnitudes", values, prefix, shift, bits, waiting=1, on=on)


@settings(max_examples=50)
@given(data=st.data(), dtype=st.sampled_from(REALS), bits=st.integers(1, 16), size=st.integers(0, 200), on=SOME)
def test_count_magnitudes(data: st.DataObject, dtype: Any, bits: int, size: int, on: Any) -> None:
    """Most prefixes are those of a value."""
    values, width = data.draw(arrays(dtype, size)), width_of(dtype)
    known = [0, 2**width - 1, *reference.magnitude(values).tolist()]
    prefix = data.draw(st.sampled_from(known) | st.integers(0, 2**width - 1))
    assert_counted(values, prefix, data.draw(st.integers(0, width - bits)), bits, on)


@pytest.mark.parametrize("shape", SHAPES)
@dtypes
def test_counts_of_distributions(shape: Callable[[int], Array], dtype: Any) -> None:
    values = shape(30_001).astype(dtype)
    for bits in (5, 11, 16):
        assert_counted(values, 0, width_of(dtype) - bits, bits)
        assert_counted(values, int(reference.magnitude(values)[0]), width_of(dtype) - 8 - bits, bits)


# --- reaching ------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data(), dtype=st.sampled_from(REALS), on=SOME)
def test_reaching_small(data: st.DataObject, dtype: Any, on: Any) -> None:
    threshold = data.draw(st.sampled_from([0.0, 5e-324, 1e-45, 1.0, 3.4e38, np.inf]) | st.floats(0, 10))
    assert_parity("reaching", *data.draw(sparse_vectors(60, dtype)), threshold, on=on, waiting=1)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_reaching_many(dtype: Any) -> None:
    indices = np.arange(0, 70_003 * 3, 3, dtype=np.int32)
    for threshold in (0.0, 1.0, 4.5):
        assert_parity("reaching", indices, normal(indices.size).astype(dtype), threshold, waiting=1)


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_shifted(size: int) -> None:
    indices = np.arange(0, 3 * size, 3, dtype=np.int32)
    for by in (0, 1, 2**31 - 15_000):
        assert_parity("shifted", indices, by, waiting=0)
        assert_parity("shifted", reference.shifted(indices, by), -by, waiting=0)


@pytest.mark.parametrize("dtype", REALS)
def test_gathered(dtype: Any) -> None:
    buffer = normal(5000).astype(dtype)
    for count in (0, 1, 700):
        positions = np.sort(np.random.default_rng(count).choice(5000, count, replace=False)).astype(np.int32)
        for factor in (1.0, -1.0, 0.3):
            assert_parity("gathered", buffer, positions, factor, waiting=0)


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_places_of_positions(size: int) -> None:
    indices = np.arange(0, 3 * size, 3, dtype=np.int32)
    for positions in ([], [0], [-5, 0, 1, 3, 4, 2999, 3000, 14_997, 2**31 - 1], list(range(-1, 900))):
        assert_parity("places", indices, OnHost(np.array(positions, np.int32)), waiting=1)
