"""What is done with one sparse vector on the device, against the NumPy reference: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import pytest
import reference
from devices import on_device, segments_on_device, to_host, waits
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import BFLOAT16, FORMATS, REALS, SCALES, Array, arrays, assert_same_bits, gradients, normal, sparse_vectors

from horovod_sparse.kernels import cuda
from horovod_sparse.place import MAX_SIZE

_EXAMPLES = settings(max_examples=60)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def optional(indices: Array | None) -> Any:
    return None if indices is None else on_device(indices)


def some(n: int, share: float, seed: int = 0) -> Array:
    """Ascending positions below n, about this share of them."""
    return np.flatnonzero(np.random.default_rng(seed).random(n) < share).astype(np.int32)


# --- add -----------------------------------------------------------------------------------------------------------


@_EXAMPLES
@given(size=st.integers(0, 100), dtype=st.sampled_from(REALS), data=st.data())
def test_add(size: int, dtype: Any, data: st.DataObject) -> None:
    expected = data.draw(arrays(dtype, size))
    indices, values = data.draw(sparse_vectors(size, dtype))
    buffer, ours = on_device(expected), (on_device(indices), on_device(values))
    with waits(0):
        cuda.add(*ours, buffer)
        cuda.add(None, buffer.copy(), buffer)
    reference.add(indices, values, expected)
    reference.add(None, expected.copy(), expected)
    assert_same_bits(to_host(buffer), expected)


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("share", [0.01, 0.9, None])
def test_add_to_many(share: float | None, dtype: Any) -> None:
    n = 20_001
    indices = None if share is None else some(n, share)
    values = normal(n if indices is None else len(indices)).astype(dtype)
    expected = normal(n, seed=1).astype(dtype)
    buffer = on_device(expected)
    cuda.add(optional(indices), on_device(values), buffer)
    reference.add(indices, values, expected)
    assert_same_bits(to_host(buffer), expected)


def test_add_ignores_what_is_outside() -> None:
    """The stand-in's arrays are fenced."""
    indices = np.array([-(2**31), -1, 3, 0, 10, 2**31 - 1], np.int32)
    buffer = on_device(np.zeros(10, np.float32))
    cuda.add(on_device(indices), on_device(np.arange(1, 7, dtype=np.float32)), buffer)
    assert to_host(buffer).tolist() == [4, 0, 0, 3, 0, 0, 0, 0, 0, 0]


# --- scatter -------------------------------------------------------------------------------------------------------


@st.composite
def scatters(draw: st.DrawFn) -> tuple[Array | None, Array, list[tuple[int, Array]]]:
    size = draw(st.integers(0, 120))
    dtype = draw(st.sampled_from(REALS))
    outputs = [(start, np.full(len(gradient), 9, gradient.dtype)) for start, gradient in draw(gradients(size))]
    if draw(st.booleans()):
        return None, draw(arrays(dtype, size)), outputs
    return (*draw(sparse_vectors(size, dtype)), outputs)


def assert_scattered(
    indices: Array | None, values: Array, outputs: list[tuple[int, Array]], scale: float = 1.0
) -> None:
    ours = segments_on_device(outputs)
    given_ = optional(indices), on_device(values)
    with waits(0):
        cuda.scatter(*given_, ours, scale)
    reference.scatter(indices, values, outputs, scale)
    for (_, output), (_, expected) in zip(ours, outputs, strict=True):
        assert_same_bits(to_host(output).view(expected.dtype), expected)


@_EXAMPLES
@given(case=scatters(), scale=SCALES)
def test_scatter(case: Any, scale: float) -> None:
    assert_scattered(*case, scale)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.7, None])
def test_scatter_to_many(format_: Any, share: float | None) -> None:
    n = 30_000
    indices = None if share is None else some(n, share)
    values = normal(n if indices is None else len(indices))
    outputs = [(5, np.ones(9_001, format_)), (9_010, np.ones(4_096, format_)), (20_000, np.ones(10_000, format_))]
    assert_scattered(indices, values, outputs, 0.25)


def test_scatter_to_many_small_tensors() -> None:
    outputs = [(40 * i, np.ones(i % 41, FORMATS[i % 4])) for i in range(500)]
    indices = some(20_000, 0.3)
    assert_scattered(indices, normal(len(indices)), outputs, 3.0)
    assert_scattered(None, normal(20_000), outputs, 3.0)


@pytest.mark.parametrize("lead", range(9))
@pytest.mark.parametrize("count", [0, 1, 5, 100, 4099])
def test_only_the_outputs_are_cleared(lead: int, count: int) -> None:
    """Memory is cleared 16 bytes at a time, but not in front of an output, nor behind it."""
    whole = on_device(np.ones(count + 20, np.float16))
    indices, values = on_device(np.array([1], np.int32)), on_device(np.array([3.0], np.float32))
    cuda.scatter(indices, values, [(0, whole[lead : lead + count])])
    expected = np.ones(count + 20, np.float16)
    expected[lead : lead + count] = 0
    expected[lead + 1 : lead + 2] = 3 if count > 1 else 1
    assert_same_bits(to_host(whole), expected)


@pytest.mark.parametrize("format_", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("real", REALS, ids=str)
def test_scatter_rounds_to_nearest_even(format_: Any, real: Any) -> None:
    """Every 16-bit number, the middles between neighbours, and what lies just beside the middles."""
    every = np.arange(2**16, dtype=np.uint16).view(format_).astype(np.float32)
    middles = (every[:-1] + every[1:]) / 2
    beside = [np.nextafter(middles, np.float32(limit)) for limit in (-np.inf, np.inf)]
    values = np.concatenate([every, middles, *beside]).astype(real)
    assert_scattered(None, values, [(0, np.ones(len(values), format_))])


def test_scatter_at_the_ends_of_int32() -> None:
    indices = np.array([0, 7, MAX_SIZE - 8, MAX_SIZE - 1], np.int32)
    outputs = [(0, np.ones(8, np.float32)), (MAX_SIZE - 8, np.ones(8, np.float32))]
    assert_scattered(indices, normal(4), outputs)


def test_scatter_ignores_indices_below_zero() -> None:
    output = on_device(np.ones(4, np.float32))
    cuda.scatter(on_device(np.array([-3, -1, 2], np.int32)), on_device(np.full(3, 5.0)), [(0, output)])
    assert to_host(output).tolist() == [0, 0, 5, 0]


def test_scatter_by_a_scale_beyond_the_values() -> None:
    """As the CPU's, which does not ask whether a scale is finite."""
    output = np.ones(2, np.float32)
    assert_scattered(np.array([1], np.int32), np.ones(1, np.float32), [(0, output)], 1e300)
    assert output[1] == np.inf


# --- exclude -------------------------------------------------------------------------------------------------------


def assert_excluded(indices: Array, values: Array, others: Array) -> None:
    ours = on_device(indices), on_device(values), on_device(others)
    with waits(int(len(indices) > 0 and len(others) > 0)):
        kept = cuda.exclude(*ours)
    expected = reference.exclude(indices, values, others)
    assert_same_bits(to_host(kept[0]), expected[0])
    assert_same_bits(to_host(kept[1]), expected[1])


@st.composite
def exclusions(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    """A vector and others, some of which are in it."""
    size = draw(st.sampled_from([0, 1, 50, 100_000]))
    indices, values = draw(sparse_vectors(size, draw(st.sampled_from(REALS))))
    others, _ = draw(sparse_vectors(size, np.dtype(np.float32)))
    shared = indices[draw(arrays(np.dtype(np.float32), len(indices))) > 0]
    return indices, values, np.union1d(others, shared).astype(np.int32)


@_EXAMPLES
@given(exclusion=exclusions())
def test_exclude(exclusion: Any) -> None:
    assert_excluded(*exclusion)


@pytest.mark.parametrize("counts", [(1025, 1), (20_000, 3), (3, 20_000), (10_000, 12_000)])
@pytest.mark.parametrize("spread", [1, 3, 1000])
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_exclude_from_many(counts: tuple[int, int], spread: int, dtype: Any) -> None:
    rng, size = np.random.default_rng(0), max(counts) * spread + 1
    indices, others = (np.sort(rng.choice(size, count, replace=False)).astype(np.int32) for count in counts)
    assert_excluded(indices, normal(len(indices)).astype(dtype), others)


def test_exclude_all_none_and_beside() -> None:
    indices, values = some(10**6, 0.005), normal(10**6)
    values = values[: len(indices)]
    assert_excluded(indices, values, indices)
    beside = np.setdiff1d(np.union1d(indices - 1, indices + 1), indices)
    assert_excluded(indices, values, beside.astype(np.int32))


def test_exclude_at_the_ends_of_int32() -> None:
    last = 2**31 - 2
    indices, values = np.array([0, 5, last - 1, last], np.int32), np.array([np.nan, -0.0, 3.0, 4.0])
    assert_excluded(indices, values, np.array([5, last], np.int32))


@pytest.mark.parametrize("seed", range(3))
def test_exclude_reads_and_writes_nothing_beside_the_arrays(seed: int) -> None:
    """Whatever the indices are; the stand-in's arrays are fenced."""
    rng = np.random.default_rng(seed)
    indices, others = (rng.integers(-(2**31), 2**31, count).astype(np.int32) for count in (3000, 2000))
    kept, _ = cuda.exclude(on_device(indices), on_device(normal(3000)), on_device(others))
    assert 0 < kept.size <= 3000


# --- count_magnitudes ----------------------------------------------------------------------------------------------


def assert_counted(values: Array, prefix: int, shift: int, bits: int) -> None:
    ours = on_device(values)
    with waits(1):
        counts = cuda.count_magnitudes(ours, prefix, shift, bits)
    assert type(counts) is np.ndarray
    expected = reference.count_magnitudes(values, prefix, shift, bits)
    assert_same_bits(counts.astype(np.float64), expected.astype(np.float64))
    assert counts.dtype == np.int64


@_EXAMPLES
@given(data=st.data(), dtype=st.sampled_from(REALS), bits=st.integers(1, 16), size=st.integers(0, 200))
def test_count_magnitudes(data: st.DataObject, dtype: Any, bits: int, size: int) -> None:
    values, width = data.draw(arrays(dtype, size)), 8 * dtype.itemsize - 1
    shift = data.draw(st.integers(0, width - bits))
    prefix = data.draw(st.sampled_from([0, 2**width - 1, *reference.magnitude(values).tolist()]))
    assert_counted(values, prefix, shift, bits)


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("bits", [1, 8, 11, 13, 14, 16])
@pytest.mark.parametrize("shape", [normal, np.zeros, lambda n: np.round(normal(n))], ids=["normal", "zeros", "coarse"])
def test_count_magnitudes_of_many(shape: Callable[[int], Array], bits: int, dtype: Any) -> None:
    values = shape(30_001).astype(dtype)
    assert_counted(values, 0, 8 * dtype.itemsize - 1 - bits, bits)
    assert_counted(values, int(reference.magnitude(values)[0]), 8 * dtype.itemsize - 9 - bits, bits)


# --- bad input -----------------------------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    at, values, buffer = cupy.zeros(3, np.int32), cupy.zeros(3, np.float32), cupy.zeros(8, np.float32)
    strided, host, nothing = cupy.zeros(6, np.int32)[::2], np.zeros(3, np.float32), None
    unaligned = cupy.zeros(16, np.uint8)[1:13].view(np.float32)
    count, scatter = cuda.count_magnitudes, cuda.scatter
    return {
        "add too few": (ValueError, "3 values for all of 8 positions", lambda: cuda.add(None, values, buffer)),
        "add another dtype": (ValueError, "float64 is not float32", lambda: cuda.add(at, cupy.zeros(3), buffer)),
        "add int64": (ValueError, "int64 is not int32", lambda: cuda.add(cupy.zeros(3, np.int64), values, buffer)),
        "add strided": (ValueError, "contiguous", lambda: cuda.add(strided, values, buffer)),
        "add lengths": (ValueError, "3 indices, but 2 values", lambda: cuda.add(at, values[:2], buffer)),
        "add to integers": (ValueError, "buffer: dtype int32", lambda: cuda.add(at, values, cupy.zeros(8, np.int32))),
        "add unaligned": (ValueError, "vector: values: must be aligned", lambda: cuda.add(at, unaligned, buffer)),
        "add from the host": (TypeError, "CuPy", lambda: cuda.add(at, host, buffer)),
        "add to the host": (TypeError, "buffer: expected a CuPy", lambda: cuda.add(at, values, host)),
        "scatter integers": (ValueError, "dtype int32", lambda: scatter(at, cupy.zeros(3, np.int32), [])),
        "scatter beyond": (ValueError, "inside 3", lambda: scatter(None, values, [(0, buffer)])),
        "scatter beyond 2**31": (ValueError, "segment 0", lambda: scatter(at, values, [(2**31 - 8, buffer)])),
        "scatter overlap": (ValueError, "behind 8", lambda: scatter(at, values, [(0, buffer), (7, buffer)])),
        "scatter strided": (ValueError, "contiguous", lambda: scatter(at, values, [(0, buffer[::2])])),
        "scatter to integers": (ValueError, "int32", lambda: scatter(at, values, [(0, at)])),
        "scatter to the host": (TypeError, "CuPy", lambda: scatter(at, values, [(0, host)])),
        "exclude dense": (ValueError, "has no indices", lambda: cuda.exclude(nothing, values, at)),  # type: ignore[arg-type]
        "exclude int64": (ValueError, "others: dtype int64", lambda: cuda.exclude(at, values, cupy.zeros(3, np.int64))),
        "exclude strided": (ValueError, "others", lambda: cuda.exclude(at, values, strided)),
        "exclude lengths": (ValueError, "3 indices, but 2 values", lambda: cuda.exclude(at, values[:2], at)),
        "exclude from the host": (TypeError, "others: expected a CuPy", lambda: cuda.exclude(at, values, host)),
        "no bits": (ValueError, "bits must be 1 .. 16, not 0", lambda: count(values, 0, 0, 0)),
        "17 bits": (ValueError, "bits must be 1 .. 16, not 17", lambda: count(values, 0, 0, 17)),
        "negative shift": (ValueError, "not -1", lambda: count(values, 0, -1, 8)),
        "large shift": (ValueError, "shift must be 0 .. 23 for 8 of 31 bits, not 24", lambda: count(values, 0, 24, 8)),
        "prefix": (
            ValueError,
            "prefix must have at most 31 bits, but is 2147483648",
            lambda: count(values, 2**31, 0, 8),
        ),
        "negative prefix": (ValueError, "but is -1", lambda: count(values, -1, 0, 8)),
        "count integers": (ValueError, "int32", lambda: count(at, 0, 0, 8)),
        "count on the host": (TypeError, "CuPy", lambda: count(host, 0, 0, 8)),
    }


@pytest.mark.parametrize("name", list(bad_calls()))
def test_bad_input_is_refused(name: str) -> None:
    error, text, call = bad_calls()[name]
    with pytest.raises(error, match=text):
        call()
