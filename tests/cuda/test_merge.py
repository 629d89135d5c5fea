"""merge_sum on the device against the NumPy reference: the same bits, and one number waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
import reference
from devices import on_device, to_host, waits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import REALS, Array, assert_same_bits, normal, sparse_vectors

from horovod_sparse.kernels import cuda
from horovod_sparse.kernels.cuda import vectors as module

Vector = tuple[Array, Array]


@pytest.fixture(params=[(10, 10), (15, 15), (10, 15)], ids=["narrow", "wide", "as chosen"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of few positions, of many, and of as many as the density suggests."""
    monkeypatch.setattr(module, "_NARROWEST", request.param[0])
    monkeypatch.setattr(module, "_WIDEST", request.param[1])


def to_device(vectors: list[Vector]) -> list[Any]:
    return [(on_device(indices), on_device(values)) for indices, values in vectors]


def assert_merged(vectors: list[Vector], size: int) -> None:
    ours, filled = to_device(vectors), sum(len(indices) > 0 for indices, _ in vectors)
    with waits(int(filled > 1)):
        indices, values = cuda.merge_sum(ours, size)
    expected = reference.merge_sum(vectors, size)
    assert_same_bits(to_host(indices), expected[0])
    assert_same_bits(to_host(values), expected[1])


def vector(rng: np.random.Generator, low: int, high: int, count: int, dtype: Any = np.float32) -> Vector:
    indices = low + np.sort(rng.choice(high - low, count, replace=False))
    return indices.astype(np.int32), rng.standard_normal(count).astype(dtype)


@st.composite
def merges(draw: st.DrawFn) -> tuple[list[Vector], int]:
    size = draw(st.sampled_from([0, 1, 50, 1024, 4097, 100_000]))
    dtype = draw(st.sampled_from(REALS))
    return draw(st.lists(sparse_vectors(size, dtype), min_size=1, max_size=6)), size


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(merge=merges())
def test_merge_sum(merge: Any) -> None:
    with np.errstate(all="ignore"):
        assert_merged(*merge)


@pytest.mark.parametrize("density", [0.0005, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("count", [2, 3, 8, 21])
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_merge_sum_of_many(tiles: None, count: int, density: float, dtype: Any) -> None:
    rng, size = np.random.default_rng(0), 40_000 if count < 8 else 8000
    vectors = [vector(rng, 0, size, round(density * size) * (rank != 1), dtype) for rank in range(count)]
    assert_merged(vectors, size)


def test_the_tiles_suit_the_density() -> None:
    """About 256 entries of each vector in a tile, and at most what fits a block."""
    assert module._Merge.of(8_000_000, 8, 336_000_000) == module._Merge(15, 10_254, 82_040, 8_000_000)
    assert module._Merge.of(80_000, 8, 1_000_000) == module._Merge(14, 62, 504, 80_000)
    assert module._Merge.of(3000, 3, 1000) == module._Merge(10, 1, 6, 1000)


@pytest.mark.parametrize("size", [1023, 1024, 1025, 30_000])
def test_merge_sum_in_a_full_bucket(tiles: None, size: int) -> None:
    """There is room for as many sums as positions, though there are more entries."""
    everything = np.arange(size, dtype=np.int32)
    assert_merged([(everything, normal(size, seed=rank)) for rank in range(3)], size)


@pytest.mark.parametrize("ranges", [(0, 0), (0, 4000), (10_000, 0), (24_000, 24_999)])
def test_merge_sum_of_ranges(tiles: None, ranges: tuple[int, int]) -> None:
    """Vectors that are equal where they are, that overlap and that follow one another; most tiles have no entries."""
    rng, size = np.random.default_rng(0), 200_000
    assert_merged([vector(rng, low, low + 3000, 1500) for low in ranges], size)


def test_merge_sum_at_the_int32_limit() -> None:
    size = 2**31 - 1
    first = np.array([size - 40_000, size - 1], np.int32), np.array([1.0, 2.0])
    second = np.array([size - 2, size - 1], np.int32), np.array([3.0, 4.0])
    indices, values = cuda.merge_sum(to_device([first, second]), size)
    np.testing.assert_array_equal(to_host(indices), [size - 40_000, size - 2, size - 1])
    np.testing.assert_array_equal(to_host(values), [1.0, 3.0, 6.0])


def test_values_are_added_in_the_order_of_the_vectors() -> None:
    at = np.array([7], np.int32)
    big, one = np.array([1e30], np.float32), np.array([1.0], np.float32)
    for vectors, total in (([big, -big, one], 1), ([one, big, -big], 0), ([one, -one], 0)):
        _, values = cuda.merge_sum(to_device([(at, values) for values in vectors]), 8)
        assert to_host(values).tolist() == [total]


@pytest.mark.parametrize("others", [0, 1, 5], ids="{} empty vectors more".format)
def test_signed_zeros_stay(others: int) -> None:
    empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
    at = np.arange(4, dtype=np.int32)
    first, second = np.array([0, 0, -0.0, -0.0], np.float32), np.array([0, -0.0, 0, -0.0], np.float32)
    indices, values = cuda.merge_sum(to_device([(at, first), (at, second), *[empty] * others]), 4)
    np.testing.assert_array_equal(np.signbit(to_host(values)), [False, False, False, True])
    np.testing.assert_array_equal(to_host(indices), at)
    _, values = cuda.merge_sum(to_device([(at, first), *[empty] * others]), 4)
    np.testing.assert_array_equal(np.signbit(to_host(values)), [False, False, True, True])


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_the_first_nan_stays_with_its_payload(dtype: Any) -> None:
    bits = np.dtype(f"u{dtype.itemsize}").type
    quiet = np.array([np.nan], dtype).view(bits)[0]
    first, second = (np.array([quiet | bits(payload)], bits).view(dtype) for payload in (5, 9))
    zero, at = np.zeros(1, dtype), np.array([3], np.int32)
    for values in ([first, second, zero], [zero, first, second], [first, zero, zero]):
        _, total = cuda.merge_sum(to_device([(at, one) for one in values]), 4)
        assert to_host(total).view(bits)[0] == quiet | bits(5)


def test_one_vector_with_entries_is_copied() -> None:
    indices, values = on_device(np.array([2, 5], np.int32)), on_device(np.array([1.0, 2.0]))
    empty = cupy.empty(0, np.int32), cupy.empty(0, np.float64)
    with waits(0):
        sums = cuda.merge_sum([empty, (indices, values), empty], 6)
    values[...] = 0
    assert to_host(sums[0]).tolist() == [2, 5]
    assert to_host(sums[1]).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("count", "kept"), [(0, False), (4, False), (5, True), (10, True)])
def test_little_is_kept_beside_the_sums(count: int, kept: bool) -> None:
    """At least half of what was allotted is used, or the rest is given back."""
    allotted = cupy.arange(10, dtype=np.int32), cupy.zeros(10, np.float32)
    indices, values = module._first(count, *allotted)
    assert to_host(indices).tolist() == list(range(count))
    assert (indices.data.ptr == allotted[0].data.ptr) == (values.data.ptr == allotted[1].data.ptr) == kept


# --- indices that are not what they should be ----------------------------------------------------------------------


def test_entries_outside_of_the_bucket_are_left_out(tiles: None) -> None:
    rng, size = np.random.default_rng(0), 5000
    wild = np.array([-(2**31), -70_000, -1, *range(0, size, 7), size, size + 1, size + 2000, 2**31 - 1])
    vectors = [vector(rng, 0, size, 300), (wild.astype(np.int32), normal(len(wild))), vector(rng, 0, size, 300)]
    inside = (wild >= 0) & (wild < size)
    filtered = [vectors[0], (wild[inside].astype(np.int32), normal(len(wild))[inside]), vectors[2]]
    indices, values = cuda.merge_sum(to_device(vectors), size)
    expected = reference.merge_sum(filtered, size)
    assert_same_bits(to_host(indices), expected[0])
    assert_same_bits(to_host(values), expected[1])


@pytest.mark.parametrize("size", [0, 9])
def test_nothing_inside_of_the_bucket(size: int) -> None:
    outside = [np.array([-5, -2], np.int32), np.array([9, 2**31 - 1], np.int32)]
    for array in cuda.merge_sum(to_device([(at, normal(2)) for at in outside]), size):
        assert array.size == 0


@pytest.mark.parametrize("indices", ["random", "descending", "equal"])
def test_nothing_is_written_beside_the_sums_whatever_the_indices_are(tiles: None, indices: str) -> None:
    """The stand-in's arrays are fenced."""
    rng, size, count = np.random.default_rng(0), 4000, 3000
    wild = {
        "random": rng.integers(-(2**31), 2**31, count),
        "descending": np.arange(count)[::-1],
        "equal": np.full(count, 5),
    }[indices].astype(np.int32)
    near = rng.integers(-10, size + 10, count).astype(np.int32)
    vectors = [(wild, normal(count)), (near, normal(count)), vector(rng, 0, size, 1000)]
    found = to_host(cuda.merge_sum(to_device(vectors), size)[0]).astype(np.int64)
    assert len(found) > 0
    assert np.all(np.diff(found) > 0)
    assert found[0] >= 0
    assert found[-1] < size


# --- bad input -----------------------------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    at, values = cupy.zeros(3, np.int32), cupy.zeros(3, np.float32)
    merge = cuda.merge_sum
    return {
        "nothing": (ValueError, "at least one vector", lambda: merge([], 5)),
        "negative size": (ValueError, "-1", lambda: merge([(at, values)], -1)),
        "size of 2**31": (ValueError, "2147483648", lambda: merge([(at, values)], 2**31)),
        "no pair": (ValueError, "vector 1: expected", lambda: merge([(at, values), at], 5)),  # type: ignore[list-item]
        "dense": (ValueError, "vector 0: has no indices", lambda: merge([(None, values)], 5)),  # type: ignore[list-item]
        "mixed dtypes": (
            ValueError,
            "vector 1: values: dtype float64",
            lambda: merge([(at, values), (at, cupy.zeros(3))], 5),
        ),
        "empty of another dtype": (
            ValueError,
            "vector 1: values: dtype float64",
            lambda: merge([(at, values), (at[:0], cupy.zeros(0))], 5),
        ),
        "lengths": (ValueError, "3 indices, but 2 values", lambda: merge([(at, values[:2])], 5)),
        "int64": (ValueError, "int64 is not int32", lambda: merge([(cupy.zeros(3, np.int64), values)], 5)),
        "float16": (ValueError, "float16", lambda: merge([(at, cupy.zeros(3, np.float16))], 5)),
        "strided": (ValueError, "contiguous", lambda: merge([(cupy.zeros(6, np.int32)[::2], values)], 5)),
        "host": (TypeError, "CuPy", lambda: merge([(at, values), (at, np.zeros(3, np.float32))], 5)),
    }


@pytest.mark.parametrize("name", list(bad_calls()))
def test_bad_input_is_refused(name: str) -> None:
    error, text, call = bad_calls()[name]
    with pytest.raises(error, match=text):
        call()
