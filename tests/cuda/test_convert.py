"""Values for the wire on the device: the reference's bits, and the laws of the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import pytest
import reference
import wire_laws as laws
from devices import on_device, to_host, waits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import assert_same_bits
from wire_laws import FORMATS, NARROWING, difficult

from horovod_sparse.collectives.wire import Wire, concatenate
from horovod_sparse.kernels import cuda
from horovod_sparse.vector import SparseVector

narrowing = pytest.mark.parametrize(("name", "dtype"), NARROWING)
_EXAMPLES = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


# --- the kernels ---------------------------------------------------------------------------------------------------


@narrowing
def test_narrow_and_widen(name: str, dtype: str) -> None:
    values = difficult(name, dtype)
    expected, ours = reference.narrow(values, name), on_device(values)
    out = cupy.zeros(expected.size + 16, np.uint8)
    with waits(0):
        message = cuda.narrow(ours, name)
        cuda.narrow(ours, name, out=out[8:-8])
        wide = cuda.widen(message, name, np.dtype(dtype))
    assert_same_bits(to_host(message).view(FORMATS[name]), expected.view(FORMATS[name]))
    assert to_host(out).tobytes() == bytes(8) + to_host(message).tobytes() + bytes(8)
    assert_same_bits(to_host(wide), reference.widen(expected, name, dtype))


@narrowing
def test_round_values(name: str, dtype: str) -> None:
    values = difficult(name, dtype)
    given_ = on_device(values)
    with waits(0):
        parts = cuda.round_values(given_, name)
    for ours, expected in zip(parts, reference.round_values(values, name), strict=True):
        assert_same_bits(to_host(ours), expected)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_nothing_is_converted_to_the_format_of_the_values(name: str) -> None:
    values = on_device(np.array([1.5, -0.0, np.nan], name))
    message = cuda.narrow(values, name)
    assert message.data.ptr == values.data.ptr
    out = cupy.zeros(values.nbytes, np.uint8)
    assert to_host(cuda.narrow(values, name, out=out)).tobytes() == to_host(values).tobytes()
    assert cuda.widen(out, name, values.dtype).data.ptr == out.data.ptr
    rounded, error = cuda.round_values(values, name)
    assert rounded is values
    assert to_host(error).tolist() == [0, 0, 0]


@narrowing
def test_of_nothing(name: str, dtype: str) -> None:
    empty = cupy.empty(0, dtype)
    assert cuda.narrow(empty, name).size == 0
    assert cuda.widen(cupy.empty(0, np.uint8), name, empty.dtype).dtype == dtype
    assert [one.dtype for one in cuda.round_values(empty, name)] == [dtype, dtype]


# --- the laws ------------------------------------------------------------------------------------------------------


@narrowing
@_EXAMPLES
@given(data=st.data())
def test_what_survives_and_the_error_are_exactly_the_vector(name: str, dtype: str, data: st.DataObject) -> None:
    laws.check_parts(on_device, name, dtype, data.draw(laws.numbers(dtype)))


@narrowing
@_EXAMPLES
@given(data=st.data())
def test_what_was_rounded_survives_the_way(name: str, dtype: str, data: st.DataObject) -> None:
    laws.check_survival(on_device, name, dtype, data.draw(laws.numbers(dtype)))


@narrowing
@_EXAMPLES
@given(data=st.data())
def test_numbers_inside_the_range_go_to_the_nearest(name: str, dtype: str, data: st.DataObject) -> None:
    laws.check_nearest(on_device, name, dtype, data.draw(laws.numbers("float32")))


@pytest.mark.parametrize(("name", "values"), [("float16", [65519, -65521, 1e8]), ("bfloat16", [3.4e38, -3.4e38])])
def test_numbers_beyond_the_range_saturate(name: str, values: list[float]) -> None:
    laws.check_saturation(on_device, name, values)


def test_where_the_rest_could_not_be_held_everything_stays_behind() -> None:
    laws.check_what_stays_behind(on_device)


@narrowing
def test_infinity_and_nan_travel_as_they_are(name: str, dtype: str) -> None:
    laws.check_not_finite(on_device, name, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", [None, *FORMATS])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_an_entry_takes_four_bytes_beside_its_value(name: str | None, dtype: Any, count: int) -> None:
    laws.check_entries(on_device, name, dtype, count)


# --- the wire's ways on the device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize("name", [None, *FORMATS])
@pytest.mark.parametrize("count", [4, 5])
def test_what_arrived_is_aligned_and_viewed_where_that_is_possible(name: str | None, dtype: Any, count: int) -> None:
    wire, vector = Wire(name), laws.sparse(on_device, np.ones(count), dtype)
    with waits(0):
        message = wire.pack(vector.entries)
        indices, values = wire.unpack(message, dtype)
    end = count * wire.dtype(dtype).itemsize
    assert indices.data.ptr % 4 == 0
    assert values.data.ptr % dtype.itemsize == 0
    assert (values.data.ptr == message.data.ptr) == (wire.dtype(dtype) == dtype)
    assert (indices.data.ptr == message.data.ptr + end) == (end % 4 == 0)


@pytest.mark.parametrize(("name", "dtype"), [(None, "float32"), (None, "float64"), ("float32", "float32")])
def test_values_as_narrow_as_the_format_are_left_alone(name: str | None, dtype: str) -> None:
    vector = laws.sparse(on_device, [1e-45, 0.1, 3e38], dtype)
    with waits(0):
        rounded, error = Wire(name).round(vector)
        message = Wire(name).write(vector.values)
    assert rounded is vector
    assert len(error) == 0
    assert message.data.ptr == vector.values.data.ptr


def test_a_vector_without_indices_is_left_alone() -> None:
    vector = SparseVector.full(on_device(np.array([0.1], np.float32)))
    with waits(0):
        rounded, error = Wire("float16").round(vector)
    assert rounded is vector
    assert len(error) == 0


def test_rounding_waits_once() -> None:
    vector = laws.sparse(on_device, [0.1, 1.0, 1e30])
    with waits(1):
        Wire("float16").round(vector)


def test_joined_parts_keep_their_dtypes() -> None:
    ours = [laws.sparse(on_device, values).entries for values in ([2.5], [], [3.5])]
    indices, values = concatenate(ours)
    assert (indices.dtype, values.dtype) == (np.int32, np.float32)
    assert (to_host(indices).tolist(), to_host(values).tolist()) == ([0, 0], [2.5, 3.5])


# --- bad input -----------------------------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    values, message, real = cupy.zeros(3, np.float32), cupy.zeros(16, np.uint8), np.dtype(np.float32)
    integers, host = cupy.zeros(3, np.int32), np.zeros(3, np.float32)
    narrow, widen, round_ = cuda.narrow, cuda.widen, cuda.round_values
    return {
        "unknown": (ValueError, "unknown format 'float8'", lambda: narrow(values, "float8")),
        "wider": (ValueError, "float64 is wider", lambda: narrow(values, "float64")),
        "wider message": (ValueError, "float64 is wider", lambda: widen(message, "float64", real)),
        "wider rounding": (ValueError, "float64 is wider", lambda: round_(values, "float64")),
        "integers": (ValueError, "int32 is neither", lambda: narrow(integers, "float16")),
        "rounded integers": (ValueError, "int32 is neither", lambda: round_(integers, "float16")),
        "to float16": (ValueError, "float16 is neither", lambda: widen(message, "float16", np.dtype(np.float16))),
        "out too short": (ValueError, "4 bytes are not those", lambda: narrow(values, "float16", message[:4])),
        "out of floats": (ValueError, "float32 is not uint8", lambda: narrow(values, "float16", values)),
        "out unaligned": (ValueError, "aligned to values of 2", lambda: narrow(values, "float16", message[1:7])),
        "half a value": (ValueError, "3 bytes are no whole", lambda: widen(message[:3], "bfloat16", real)),
        "message unaligned": (ValueError, "aligned to", lambda: widen(message[2:6], "float32", real)),
        "message of floats": (ValueError, "float32 is not uint8", lambda: widen(values, "float16", real)),
        "strided": (ValueError, "contiguous", lambda: narrow(cupy.zeros(6, np.float32)[::2], "float16")),
        "host": (TypeError, "CuPy", lambda: narrow(host, "float16")),
        "message on the host": (TypeError, "CuPy", lambda: widen(host.view(np.uint8), "float16", real)),
        "out on the host": (TypeError, "CuPy", lambda: narrow(values, "float16", host.view(np.uint8)[:6])),
    }


@pytest.mark.parametrize("name", list(bad_calls()))
def test_bad_input_is_refused(name: str) -> None:
    error, text, call = bad_calls()[name]
    with pytest.raises(error, match=text):
        call()
