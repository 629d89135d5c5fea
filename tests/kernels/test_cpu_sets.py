"""merge_sum and exclude against the NumPy reference: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from inputs import REALS, Array, arrays, assert_same_bits, sparse_vectors

from horovod_sparse.kernels import cpu

SIZES = st.sampled_from([0, 1, 50, 16384, 16385, 100_000])

Vector = tuple[Array, Array]


def assert_same(ours: Vector, expected: Vector) -> None:
    assert_same_bits(ours[0], expected[0])
    assert_same_bits(ours[1], expected[1])


def vector(rng: np.random.Generator, low: int, high: int, count: int, dtype: Any = np.float32) -> Vector:
    """A vector of so many entries in low .. high."""
    indices = low + np.sort(rng.choice(high - low, count, replace=False))
    return indices.astype(np.int32), rng.standard_normal(count).astype(dtype)


# --- merge_sum -----------------------------------------------------------------------------------------------------


@st.composite
def merges(draw: st.DrawFn) -> tuple[list[Vector], int]:
    size = draw(SIZES)
    dtype = draw(st.sampled_from(REALS))
    return draw(st.lists(sparse_vectors(size, dtype), min_size=1, max_size=6)), size


@given(merge=merges())
def test_merge_sum(level: str, merge: Any) -> None:
    assert_same(cpu.merge_sum(*merge), reference.merge_sum(*merge))


@pytest.mark.parametrize("density", [0.0, 0.0001, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_merge_sum_large(level: str, count: int, density: float, dtype: Any) -> None:
    rng, size = np.random.default_rng(0), 50_000
    vectors = [vector(rng, 0, size, round(density * size) * (rank != 5), dtype) for rank in range(count)]
    assert_same(cpu.merge_sum(vectors, size), reference.merge_sum(vectors, size))


@pytest.mark.parametrize("counts", [(0, 0), (0, 9), (1, 1), (1, 5000), (5000, 2), (4999, 5000), (5000, 5000)])
@pytest.mark.parametrize("ranges", [(0, 0), (0, 4000), (0, 10_000), (10_000, 0)])
def test_merge_sum_of_two(counts: tuple[int, int], ranges: tuple[int, int]) -> None:
    """Vectors that are equal where they are, that overlap and that follow one another; either end is used up first."""
    rng = np.random.default_rng(0)
    for step in (1, 3):
        vectors = []
        for low, count in zip(ranges, counts, strict=True):
            indices = low + step * np.arange(count, dtype=np.int32)
            vectors.append((indices.astype(np.int32), rng.standard_normal(count)))
        size = 25_000
        assert_same(cpu.merge_sum(vectors, size), reference.merge_sum(vectors, size))


def test_merge_sum_of_two_in_a_full_bucket() -> None:
    """The union has fewer entries than the two together, and memory is reserved for no more."""
    rng = np.random.default_rng(0)
    for counts in ((1000, 1000), (1000, 999), (700, 800), (3, 1000)):
        vectors = [vector(rng, 0, 1000, count) for count in counts]
        assert_same(cpu.merge_sum(vectors, 1000), reference.merge_sum(vectors, 1000))


@pytest.mark.parametrize("others", [0, 1, 5], ids="{} empty vectors more".format)
def test_merge_sum_keeps_signed_zeros(level: str, others: int) -> None:
    empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
    at = np.arange(4, dtype=np.int32)
    first, second = np.array([0, 0, -0.0, -0.0], np.float32), np.array([0, -0.0, 0, -0.0], np.float32)
    _, values = cpu.merge_sum([(at, first), (at, second), *[empty] * others], 4)
    np.testing.assert_array_equal(np.signbit(values), [False, False, False, True])
    _, values = cpu.merge_sum([(at, first), *[empty] * others], 4)
    np.testing.assert_array_equal(np.signbit(values), [False, False, True, True])


def test_merge_sum_keeps_order_of_addition_and_zeros() -> None:
    at = np.array([7], np.int32)
    big, one = np.array([1e30], np.float32), np.array([1.0], np.float32)
    assert cpu.merge_sum([(at, big), (at, -big), (at, one)], 8)[1] == 1
    assert cpu.merge_sum([(at, one), (at, big), (at, -big)], 8)[1] == 0
    assert cpu.merge_sum([(at, one), (at, -one)], 8)[1] == 0


@pytest.mark.parametrize("others", [0, 1], ids="{} empty vectors more".format)
def test_merge_sum_at_the_int32_limit(level: str, others: int) -> None:
    size = 2**31 - 1
    first = np.array([0, size - 1], np.int32), np.array([1.0, 2.0])
    second = np.array([size - 2, size - 1], np.int32), np.array([3.0, 4.0])
    empty = np.zeros(0, np.int32), np.zeros(0)
    indices, values = cpu.merge_sum([first, second, *[empty] * others], size)
    np.testing.assert_array_equal(indices, [0, size - 2, size - 1])
    np.testing.assert_array_equal(values, [1.0, 3.0, 6.0])


# --- exclude -------------------------------------------------------------------------------------------------------


@st.composite
def exclusions(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    """A vector and others, some of which are in it."""
    size = draw(SIZES)
    indices, values = draw(sparse_vectors(size, draw(st.sampled_from(REALS))))
    others, _ = draw(sparse_vectors(size, np.dtype(np.float32)))
    shared = indices[draw(arrays(np.dtype(np.float32), len(indices))) > 0]
    return indices, values, np.union1d(others, shared).astype(np.int32)


@given(exclusion=exclusions())
def test_exclude(exclusion: Any) -> None:
    assert_same(cpu.exclude(*exclusion), reference.exclude(*exclusion))


@pytest.mark.parametrize("counts", [(0, 0), (0, 100), (100, 0), (100_000, 3), (3, 100_000), (50_000, 60_000)])
@pytest.mark.parametrize("spread", [1, 3, 1000, 20_000])
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_exclude_large(counts: tuple[int, int], spread: int, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    size = max(counts) * spread + 1
    (indices, values), (others, _) = (vector(rng, 0, size, count, dtype) for count in counts)
    assert_same(cpu.exclude(indices, values, others), reference.exclude(indices, values, others))


def test_exclude_all_none_and_beside() -> None:
    indices, values = vector(np.random.default_rng(0), 0, 10**6, 5000)
    assert len(cpu.exclude(indices, values, indices)[0]) == 0
    beside = np.setdiff1d(np.union1d(indices - 1, indices + 1), indices)
    assert_same(cpu.exclude(indices, values, beside[beside >= 0].astype(np.int32)), (indices, values))


def test_exclude_at_the_int32_limit() -> None:
    last = 2**31 - 2
    indices = np.array([0, 5, last - 1, last], np.int32)
    values = np.array([np.nan, -0.0, 3.0, 4.0])
    kept = cpu.exclude(indices, values, np.array([5, last], np.int32))
    assert_same(kept, (indices[[0, 2]], values[[0, 2]]))


# --- refused input -------------------------------------------------------------------------------------------------

INT = np.arange(3, dtype=np.int32)
VALUES = np.zeros(3, np.float32)
LAST = np.array([2**31 - 1], np.int32)
HUGE_INT = np.broadcast_to(np.int32(0), 2**31)  # one element, repeated: no 8 GiB

REFUSED = {
    "merge_sum to 2**31": (lambda: cpu.merge_sum([(INT, VALUES)], 2**31), "size: 2147483648"),
    "nothing to merge": (lambda: cpu.merge_sum([], 5), "at least one vector"),
    "dense merge": (lambda: cpu.merge_sum([(None, VALUES)], 5), "vector 0: has no indices"),
    "negative size": (lambda: cpu.merge_sum([(INT, VALUES)], -1), "size must not be negative, but is -1"),
    "mixed dtypes": (lambda: cpu.merge_sum([(INT, VALUES), (INT, np.zeros(3))], 5), "vector 1: dtype float64"),
    "merge out of bounds": (lambda: cpu.merge_sum([(INT, VALUES)], 2), "vector 0: index 2 at entry 2 is outside"),
    "merge below zero": (lambda: cpu.merge_sum([(INT - 1, VALUES)], 5), "index -1 at entry 0 is outside"),
    "merge unsorted": (lambda: cpu.merge_sum([(INT[::-1].copy(), VALUES)], 5), "index 1 at entry 1 does not asc"),
    "merge repeated": (lambda: cpu.merge_sum([(INT // 2, VALUES)], 5), "index 0 at entry 1 does not ascend"),
    "second unsorted": (
        lambda: cpu.merge_sum([(INT, VALUES), (INT[::-1].copy(), VALUES)], 5),
        "vector 1: index 1 at entry 1 does not ascend; sort the indices, without repeats",
    ),
    "outside in the middle": (
        lambda: cpu.merge_sum([(np.array([0, 9, 1], np.int32), VALUES)], 5),
        "vector 0: index 9 at entry 1 is outside of 0 .. 5",
    ),
    "exclude from dense": (lambda: cpu.exclude(None, VALUES, INT), "vector: has no indices"),
    "exclude from unsorted": (lambda: cpu.exclude(INT[::-1].copy(), VALUES, INT), "vector: index 1 at entry 1 does"),
    "exclude unsorted": (lambda: cpu.exclude(INT, VALUES, INT[::-1].copy()), "others: index 1 at entry 1 does not"),
    "exclude repeated": (lambda: cpu.exclude(INT, VALUES, INT // 2), "others: index 0 at entry 1 does not ascend"),
    "exclude below zero": (lambda: cpu.exclude(INT, VALUES, INT - 1), "others: index -1 at entry 0 is outside"),
    "exclude 2**31 - 1": (lambda: cpu.exclude(INT, VALUES, LAST), "others: index 2147483647 at entry 0 is outside"),
    "exclude int64": (lambda: cpu.exclude(INT, VALUES, np.arange(3)), "others: dtype int64 is not int32"),
    "exclude strided": (lambda: cpu.exclude(INT, VALUES, INT[::2]), "others: must be contiguous"),
    "exclude 2**31": (lambda: cpu.exclude(INT, VALUES, HUGE_INT), "others: 2147483648 elements"),
    "exclude float16": (lambda: cpu.exclude(INT, VALUES.astype(np.float16), INT), "vector: values: dtype float16"),
    "exclude lengths": (lambda: cpu.exclude(INT, VALUES[:2], INT), "vector: 3 indices, but 2 values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_only_arrays() -> None:
    with pytest.raises(TypeError, match="others: expected a NumPy array, not <class 'list'>"):
        cpu.exclude(INT, VALUES, [1])  # type: ignore[arg-type]
