"""Every kernel refuses what does not fit, by its parameter's name, before anything is written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from backends import CPU, DEVICE, ONE_OF_EACH, Backend, OnHost, assert_same
from devices import on_device
from inputs import odd_address, read_only

from horovod_sparse.kernels import Kernels
from horovod_sparse.kernels.types import Accumulation

F32, F64, F100 = np.zeros(8, np.float32), np.zeros(8), np.zeros(100, np.float32)
INT, VALUES, ONE = np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.ones(1)
SKETCH, CODES, UNITS = np.zeros(32, np.float32), np.zeros(8, np.uint8), np.zeros(1, np.float32)
CODED = np.array([3, *[0] * 7], np.uint8)
SEGMENTS, NARROW = [(0, VALUES)], np.dtype(np.float32)
HUGE = np.broadcast_to(np.float32(0), 2**31)  # one element, repeated: no 8 GiB
HUGE_INT = np.broadcast_to(np.int32(0), 2**31)
SWAPPED = np.zeros(8, np.dtype(np.float32).newbyteorder())

# Arguments that are accepted, without those that have defaults.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "accumulate": (SEGMENTS, F32),
    "select": (SEGMENTS, F32, 2),
    "select_above": (SEGMENTS, F32, 1.0),
    "cut": (INT, VALUES, 1),
    "take": (SEGMENTS, F32, INT),
    "accumulate_moments": (SEGMENTS, F32),
    "count_reaching": (SEGMENTS, F32, OnHost(ONE)),
    "tail": (SEGMENTS, F32, 1.0),
    "square_norm": (SEGMENTS,),
    "largest": (SEGMENTS,),
    "block_scores": (SEGMENTS, F32, 4),
    "sample": (SEGMENTS, F32, 1.0, 0, 3),
    "add": (INT, VALUES, F32),
    "scatter": (INT, VALUES, SEGMENTS),
    "exclude": (INT, VALUES, INT),
    "places": (INT, OnHost(INT)),
    "shifted": (INT, 1),
    "gathered": (F32, INT, 1.0),
    "reaching": (INT, VALUES, 1.0),
    "merge_sum": ([(INT, VALUES)], 8),
    "count_magnitudes": (VALUES, 0, 20, 11),
    "sketch_length": (100, 0.5, 1),
    "sketch_update": (SKETCH, F100, INT, 1, 0),
    "sketch_query": (SKETCH, F100, 1, 0),
    "quantize": (F32, 8, 0),
    "dequantize": (CODES, UNITS, F32, 8),
    "encode_indices": (INT,),
    "decode_indices": (CODED, 3, 0, 0, 8),
    "check_ascending": ([INT], 8),
    "key_range": (VALUES,),
    "round_levels": (VALUES, 8, 1 << 20, 20),
    "encode_levels": (VALUES, 8, 1 << 20, 20),
    "decode_levels": (CODES, 8, 8, 1 << 20, 20, NARROW),
    "narrow": (VALUES, "float16"),
    "widen": (CODES, "float16", NARROW),
    "round_values": (VALUES, "float16"),
}
ON_A_BUCKET = {"accumulate", "select", "select_above", "take", "accumulate_moments", "count_reaching", "tail", "sample"}
WRITING = {"accumulate", "select", "select_above", "take", "accumulate_moments", "add", "sketch_query", "dequantize"}
CONVERTING = {"narrow", "widen", "round_values"}
LEVELS = {"round_levels", "encode_levels", "decode_levels"}
SORTED = {"scatter", "exclude"}
ANY = set(ACCEPTED)

Put = Callable[[Any], Any]
# A parameter, its value, the message, the kernels to try and the backends that must refuse.
Case = tuple[str, Callable[[Put], Any], str, set[str], list[Backend]]


def both(parameter: str, value: Callable[[Put], Any], message: str, kernels: set[str] = ANY) -> Case:
    return parameter, value, message, kernels, ONE_OF_EACH


def by_cpu(parameter: str, value: Callable[[Put], Any], message: str, kernels: set[str] = ANY) -> Case:
    return parameter, value, message, kernels, CPU[:1]


def constant(x: Any) -> Callable[[Put], Any]:
    return lambda _: x


def segments() -> Iterator[Case]:
    for name in ("gradients", "outputs"):
        yield both(name, lambda put: [(0, put(VALUES)), (2, put(VALUES))], "segment 1: starts at 2, before 3")
        yield both(name, lambda put: [(4, put(VALUES)), (0, put(VALUES))], "segment 1: starts at 0, before 7")
        yield both(name, lambda put: [(-1, put(VALUES))], "segment 0: starts at -1, before 0")
        yield both(name, lambda put: [(2**31 - 8, put(F32))], "segment 0: ends at 2147483648")
        yield both(name, lambda put: [(2, put(VALUES)), (6, put(VALUES))], "segment 1: ends at 9", ON_A_BUCKET)
        yield both(name, lambda put: [(0, put(INT))], "segment 0: dtype int32")
        yield both(name, lambda put: [(0, put(np.zeros(2, complex)))], "segment 0: dtype complex128")
        yield both(name, lambda put: [(0, put(np.zeros((2, 2))))], "segment 0: expected one dimension, not 2")
        yield both(name, constant([(0, [1.0])]), "segment 0: expected a (NumPy|CuPy) array")
        yield by_cpu(name, constant([(0, HUGE)]), "segment 0: 2147483648 elements")
        yield by_cpu(name, lambda put: [(0, put(SWAPPED))], "segment 0: dtype >f4.*native")
        yield by_cpu(name, constant([(0,)]), "segment 0: expected")
        yield by_cpu(name, lambda put: [(0.5, put(VALUES))], "integer")
    yield both("outputs", lambda put: [(0, put(F32)[::2])], "must be contiguous")
    yield by_cpu("outputs", lambda put: [(0, put(read_only(F32)))], "must be writable")


def arrays() -> Iterator[Case]:
    for name, dtype in (("buffer", "f4"), ("values", "f4"), ("sketch", "f4"), ("indices", "i4"), ("others", "i4")):
        yield both(name, lambda put, dtype=dtype: put(np.zeros(200, dtype))[::2], f"{name}: .*contiguous")  # type: ignore[misc]
        yield both(name, constant([1.0] * 8), f"{name}: expected a (NumPy|CuPy) array")
    for name in ("buffer", "values"):
        yield both(name, lambda put: put(INT), "dtype int32")
        yield both(name, lambda put: put(F32.astype(np.float16)), "dtype float16")
        yield both(name, lambda put: put(np.zeros((3, 3), np.float32)), "expected one dimension, not 2")
        yield by_cpu(name, constant(HUGE), "2147483648 elements", ANY - CONVERTING)
        yield by_cpu(name, lambda put: put(SWAPPED), "dtype >f4", ANY - CONVERTING)
    yield both("source", lambda put: put(np.zeros(16, np.float32))[::2], "source: .*contiguous")
    yield both("source", constant([1.0] * 8), "source: expected a (NumPy|CuPy) array")
    yield both("source", lambda put: put(F64), "source: .*float64")
    yield both("source", lambda put: put(F32[:7]), "source: 7 elements.*the buffer has 8")
    yield both(
        "velocity", lambda put: (put(np.zeros(16, np.float32))[::2], 0.9, 1.0, 0.0, 1.0), "velocity: .*contiguous"
    )
    yield both("velocity", lambda put: (put(F64), 0.9, 1.0, 0.0, 1.0), "velocity: .*float64")
    yield both("velocity", lambda put: (put(F32[:7]), 0.9, 1.0, 0.0, 1.0), "velocity: 7 elements.*the buffer has 8")
    yield both("velocity", lambda put: (put(F32), np.inf, 1.0, 0.0, 1.0), "momentum must be finite, not inf")
    yield both("velocity", lambda put: (put(F32), 0.9, np.nan, 0.0, 1.0), "share must be finite, not nan")
    yield both("velocity", lambda put: (put(F32), 0.9, 1.0, np.nan, 1.0), "fresh must be finite, not nan")
    yield both("velocity", lambda put: (put(F32), 0.9, 1.0, 0.0, np.inf), "weight must be finite, not inf")
    yield by_cpu("velocity", lambda put: (put(read_only(F32)), 0.9, 1.0, 0.0, 1.0), "velocity: is read-only")
    yield by_cpu("buffer", lambda put: put(odd_address(F32)), "buffer: must be aligned")
    yield by_cpu("buffer", lambda put: put(read_only(F100)), "buffer: is read-only", WRITING - {"dequantize"})
    yield by_cpu("buffer", lambda put: put(read_only(F32)), "buffer: is read-only", {"dequantize"})
    yield by_cpu("sketch", lambda put: put(read_only(SKETCH)), "sketch: is read-only", {"sketch_update"})
    yield both(
        "values",
        lambda put: put(VALUES[:2]),
        "3 indices, but 2 values",
        ANY - CONVERTING - LEVELS - {"count_magnitudes", "key_range"},
    )
    yield both("values", lambda put: put(np.zeros(3)), "float64 .*float32", {"add"})
    yield both("sketch", lambda put: put(np.zeros(32)), "sketch: dtype float64 is not")
    for name in ("indices", "others", "positions", "delivered"):
        yield both(name, lambda put: put(np.arange(3)), f"{name}: dtype int64 is not int32")
        yield by_cpu(name, constant(HUGE_INT), "2147483648 elements", ANY - {"places", "shifted"})
    for name in ("others", "positions", "delivered", "indices"):
        of = SORTED | {"encode_indices"} if name == "indices" else ANY
        yield by_cpu(name, lambda put: put(INT[::-1].copy()), "index 1 at entry 1 does not ascend", of)
        yield by_cpu(name, lambda put: put(INT // 2), "index 0 at entry 1 does not ascend; sort the indices", of)
        yield by_cpu(name, lambda put: put(INT - 1), "index -1 at entry 0 is outside of", of | {"add"})
    for wrong in ([3, 3], [4, 2], [0, 9, 8, 10]):
        yield both("indices", lambda put, x=wrong: put(np.array(x, np.int32)), "ascend", {"encode_indices"})  # type: ignore[misc]
    yield by_cpu("others", lambda put: put(np.array([2**31 - 1], np.int32)), "others: index 2147483647 at entry 0")
    for name, size in (("add", 8), ("take", 8), ("sketch_update", 100)):
        parameter = {"add": "indices", "take": "positions"}.get(name, "delivered")
        message = f"index {size} at entry 2 is outside of 0 .. {size}"
        yield by_cpu(parameter, lambda put, size=size: put(INT + np.int32(size - 2)), message, {name})  # type: ignore[misc]
    yield both("indices", constant(None), "vector: has no indices", {"cut", "exclude"})
    yield both("indices", constant(None), "3 values for all of 8 positions", {"add"})


def vectors() -> Iterator[Case]:
    def pair(put: Put) -> Any:
        return put(INT), put(VALUES)

    for value, message in (
        (lambda put: [], "at least one vector"),
        (lambda put: [pair(put), put(INT)], "expected .indices, values."),
        (lambda put: [(None, put(VALUES))], "vector 0: has no indices"),
        (lambda put: [pair(put), (put(INT), put(F64[:3]))], "vector 1: .*float64"),
        (lambda put: [pair(put), (put(INT[:0]), put(F64[:0]))], "vector 1: .*float64"),
        (lambda put: [(put(INT), put(VALUES[:2]))], "vector 0: 3 indices, but 2 values"),
        (lambda put: [(put(INT), put(VALUES.astype(np.float16)))], "vector 0: values: dtype float16"),
    ):
        yield both("vectors", value, message)
    for wrong, message in (
        (INT + 6, "vector 1: index 8 at entry 2 is outside of 0 .. 8"),
        (INT - 1, "vector 1: index -1 at entry 0 is outside"),
        (INT[::-1].copy(), "vector 1: index 1 at entry 1 does not ascend; sort the indices, without repeats"),
        (INT // 2, "vector 1: index 0 at entry 1 does not ascend"),
        (np.array([0, 9, 1], np.int32), "vector 1: index 9 at entry 1 is outside of 0 .. 8"),
    ):
        yield by_cpu("vectors", lambda put, x=wrong: [pair(put), (put(x), put(VALUES))], message)  # type: ignore[misc]


def numbers() -> Iterator[Case]:
    for value in (np.inf, np.nan):
        yield both("scale", constant(value), f"scale must be finite, not {value}", ANY - {"scatter"})
        yield both("carried", constant(value), f"carried must be finite, not {value}")
    for parameter, wrong, message in (
        ("k", -1, "k must not be negative, but is -1"),
        ("threshold", -1.5, "threshold must be 0 or more, not -1.5"),
        ("threshold", np.nan, "threshold must be 0 or more, not nan"),
        ("thresholds", -1.5 * ONE, "thresholds must be 0 or more, not -1.5"),
        ("thresholds", np.array([1, np.nan]), "thresholds must be 0 or more, not nan"),
        ("thresholds", np.ones(17), "thresholds: 17, but at most 16 at a time"),
        ("thresholds", F32, "thresholds: dtype float32 is not float64"),
        ("thresholds", np.ones((2, 2)), "thresholds: expected one dimension, not 2"),
        ("thresholds", [1.0], "thresholds: expected a NumPy array"),
        ("block", 0, "block must be 1 or more, not 0"),
        ("stride", 0, "stride must be 1 or more, not 0"),
        ("start", -1, "start must be 0 or more and below the stride, 3, not -1"),
        ("start", 3, "start must be 0 or more and below the stride, 3, not 3"),
        ("size", -1, "size must not be negative, but is -1"),
        ("size", 2**31, "size: 2147483648 elements"),
        ("ratio", 0.0, "ratio must be above 0 and at most 1, not 0.0"),
        ("ratio", 1.01, "ratio must be above 0 and at most 1, not 1.01"),
        ("ratio", np.nan, "ratio must be above 0 and at most 1, not nan"),
        ("rows", 2, "rows must be 1, 3 or 5, not 2"),
        ("seed", -1, "seed must not be negative, but is -1"),
        ("prefix", 2**31, "prefix must have at most 31 bits, but is 2147483648"),
        ("prefix", -1, "prefix must have at most 31 bits, but is -1"),
    ):
        yield both(parameter, constant(wrong), message)
    yield both("thresholds", lambda _: on_device(ONE), "thresholds: expected a NumPy array")
    for shift in (-1, 21):
        message = f"shift must be 0 .. 20 for 11 of 31 bits, not {shift}"
        yield both("shift", constant(shift), message, {"count_magnitudes"})
    for bits in (0, 17):
        yield both("bits", constant(bits), f"bits must be 1 .. 16, not {bits}", {"count_magnitudes"})
    yield both("bits", constant(5), "bits must be 4 or 8, not 5", LEVELS)
    yield both("bits", constant(5), "bits must be 4, 8 or 16, not 5", {"quantize", "dequantize"})
    for parameter, wrong in (("top", 1), ("top", 0x7F800000), ("shift", 15), ("shift", 24)):
        yield both(parameter, constant(wrong), f"{parameter} .*{wrong}", LEVELS)
    for parameter, wrong in (("count", 0), ("count", 99), ("first", -1), ("bits", 25)):
        yield both(parameter, constant(wrong), f"(coded indices|{parameter}).* {wrong}", {"decode_indices"})
    for threads in (0, 1025):
        yield by_cpu("threads", constant(threads), f"threads must be 1 .. 1024, not {threads}")
    yield by_cpu("thresholds", constant(np.ones(4)[::2]), "thresholds: must be contiguous")


def memories() -> Iterator[Case]:
    of = {"sketch_update", "sketch_query"}
    yield both("sketch", lambda put: put(SKETCH)[:31], "31 counters do not fit a bucket of 100 in 1 rows")
    yield both("sketch", lambda put: put(SKETCH)[:0], "0 counters do not fit")
    yield both("sketch", lambda put: put(np.zeros(112, np.float32)), "112 counters do not fit")
    yield both("rows", constant(3), "32 counters do not fit", of)
    yield both("buffer", lambda put: put(np.ones(40_000, np.float32)), "32 counters do not fit", of)
    yield both("buffer", lambda put: put(F32)[:0], "32 counters do not fit a bucket of 0", of)
    yield both("bits", constant(4), "codes: has 8 elements, but the buffer needs 4", {"dequantize"})
    yield both("bits", constant(16), "codes: dtype uint8 is not uint16", {"dequantize"})
    yield both("units", lambda put: put(UNITS)[:0], "units: has 0 elements, but the buffer needs 1")
    yield both("units", lambda put: put(ONE), "units: dtype float64 is not float32")
    yield both("codes", lambda put: put(F32), "codes: dtype float32 is not uint8")
    yield both("codes", constant([0]), "codes: expected a (NumPy|CuPy) array")


def conversions() -> Iterator[Case]:
    yield both("name", constant("float8"), "unknown format 'float8'; known are: float64, float32", CONVERTING)
    yield both("name", constant(None), "unknown format None", CONVERTING)
    yield both("name", constant("float64"), "format float64 is wider than values of float32", CONVERTING)
    yield both("dtype", constant(np.dtype(np.float16)), "dtype float16 is neither")
    yield both("out", lambda put: put(CODES)[:4], "out: has 4 bytes, but 3 values in float16 need 6")
    yield both("out", lambda put: put(VALUES), "out: dtype float32 is not uint8")
    yield both("out", lambda put: put(CODES)[1:7], "out: must be aligned to values of 2 bytes")
    yield both("message", lambda put: put(CODES)[:3], "3 bytes are not a whole number of values")
    yield both("message", lambda put: put(CODES)[1:5], "message: must be aligned to values of 2 bytes")
    yield both("message", lambda put: put(VALUES), "message: dtype float32 is not uint8")


def parameters_of(name: str) -> list[str]:
    _, *names = inspect.signature(getattr(Kernels, name)).parameters
    return [*names[:-1], *Accumulation.__annotations__] if names[-1] == "options" else names


def cases() -> Iterator[Any]:
    for make in (segments, arrays, vectors, numbers, memories, conversions):
        for parameter, value, message, kernels, on in make():
            for name in sorted(kernels):
                if on and parameter in parameters_of(name):
                    yield pytest.param(name, parameter, value, message, on, id=f"{name}: {message}")


def refuse(backend: Backend, name: str, parameter: str, value: Callable[[Put], Any], message: str, **more: Any) -> None:
    """Call a kernel with one wrong argument."""
    given: list[Any] = [backend.put(one) for one in ACCEPTED[name]]
    function = getattr(backend.kernels, name)
    bound = dict(zip(parameters_of(name), given, strict=False))
    with pytest.raises((ValueError, TypeError), match=message):
        function(**{**bound, parameter: value(backend.put)}, **more)
    written = [x.array if isinstance(x, OnHost) else x for x in ACCEPTED[name]]
    assert_same(given, written, f"{backend}: refused after something was written")


@pytest.mark.parametrize(("name", "parameter", "value", "message", "on"), list(cases()))
def test_refused(name: str, parameter: str, value: Any, message: str, on: list[Backend]) -> None:
    for backend in on:
        refuse(backend, name, parameter, value, message)


@pytest.mark.parametrize("name", ACCEPTED)
def test_arrays_of_the_other_device_are_refused(name: str) -> None:
    for position, x in enumerate(ACCEPTED[name]):
        if isinstance(x, np.ndarray):
            parameter = parameters_of(name)[position]
            refuse(DEVICE[0], name, parameter, constant(x), f"{parameter}: expected a CuPy array")
            for backend in CPU[:1]:
                refuse(backend, name, parameter, constant(on_device(x)), f"{parameter}: expected a NumPy array")


def test_unaligned_arrays_of_the_device_are_refused() -> None:
    odd = on_device(np.zeros(33, np.uint8))[1:].view(np.float32)
    for name, parameter, value in (
        ("select", "gradients", [(0, odd)]),
        ("add", "values", odd[:3]),
        ("cut", "values", odd),
    ):
        refuse(DEVICE[0], name, parameter, constant(value), "must be aligned")


def test_seeds_on_the_device_have_63_bits() -> None:
    refuse(DEVICE[0], "sketch_query", "seed", constant(2**63), "seed must be less than")


@pytest.mark.parametrize("name", ["accumulate", "select", "select_above"])
def test_gradients_that_are_to_be_left_zero_must_be_outputs(name: str) -> None:
    for backend in ONE_OF_EACH:
        refuse(backend, name, "gradients", lambda put: [(0, put(F32)[::2])], "0: .*must be contiguous", clear=True)
    for backend in CPU[:1]:
        refuse(backend, name, "gradients", constant([(0, read_only(VALUES))]), "0: .*must be writable", clear=True)
