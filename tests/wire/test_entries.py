"""Formats: a vector is parted into what survives the way and the rounding error, and nothing else; on any device."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from devices import waits
from exchanges import HOST, STAGED, through
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import digest

from horovod_sparse.kernels import to_host
from horovod_sparse.kernels.formats import FORMATS
from horovod_sparse.wire import concatenate, wire_for

# Beyond float16 and bfloat16, subnormal in either, halfway between two neighbours, and too large for an exact rest.
SPECIAL = [0, -0.0, 65504, 65520, -7e4, 3.395e38, 3.4e38, 6e-8, 2e-8, 1e-40, 1 + 2**-8, 1 + 2**-11, 2**30 + 128, -1e30]
NARROWING = [("float16", "float32"), ("bfloat16", "float32")]
NARROWING += [(name, "float64") for name in ("float32", "float16", "bfloat16")]
EXACT = [(None, "float32"), (None, "float64"), ("float32", "float32")]

narrowing = pytest.mark.parametrize(("name", "dtype"), NARROWING)
some = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[HOST, STAGED])
def put(request):
    with through(request.param) as put, np.errstate(all="ignore"):
        yield put


def numbers(dtype):
    special = st.sampled_from([float(np.dtype(dtype).type(one)) for one in SPECIAL])
    width = 8 * np.dtype(dtype).itemsize
    return st.lists(st.floats(width=width, allow_nan=False, allow_infinity=False) | special, max_size=20)


def nearest(values, name):
    """Reference: to nearest even, of numbers inside the format's range."""
    if name != "bfloat16":
        return values.astype(FORMATS[name])
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32)


def rounded(put, name, values, dtype="float32"):
    """Values and errors, on the host."""
    given_ = put(np.asarray(values, dtype))
    survives, error = map(to_host, wire_for(name, given_.dtype).round(given_))
    assert survives.dtype == error.dtype == dtype
    return survives, error


@narrowing
@some
@given(data=st.data())
def test_what_survives_the_way_and_the_error_are_exactly_the_values(put, name, dtype, data):
    values = data.draw(numbers(dtype))
    survives, errors = rounded(put, name, values, dtype)
    sums = [Fraction(one) + Fraction(error) for one, error in zip(survives.tolist(), errors.tolist(), strict=True)]
    assert sums == [Fraction(float(np.dtype(dtype).type(value))) for value in values]
    wire, indices = wire_for(name, np.dtype(dtype)), np.arange(len(values), dtype=np.int32) * 3
    arrived = map(to_host, wire.unpack(wire.pack((put(indices), put(survives)))))
    assert [one.tobytes() for one in arrived] == [indices.tobytes(), survives.tobytes()]


@narrowing
@some
@given(data=st.data())
def test_numbers_inside_the_range_go_to_the_nearest(put, name, dtype, data):
    largest = float(ml_dtypes.finfo(FORMATS[name]).max)
    inside = np.clip(np.asarray(data.draw(numbers("float32")), np.float32), -largest, largest).astype(dtype)
    assert np.array_equal(rounded(put, name, inside, dtype)[0], nearest(inside, name))


@pytest.mark.parametrize(("name", "values"), [("float16", [65519, -65521, 1e8]), ("bfloat16", [3.4e38, -3.4e38])])
def test_numbers_beyond_the_range_saturate(put, name, values):
    largest = float(ml_dtypes.finfo(FORMATS[name]).max)
    assert np.array_equal(rounded(put, name, values)[0], np.sign(values) * largest)


def test_where_the_rest_could_not_be_held_everything_stays_behind(put):
    survives, errors = rounded(put, "float16", [2**30 + 128, 1, -1e30])
    assert survives.tolist() == [0, 1, 0]
    assert errors.tolist() == [2**30 + 128, 0, np.float32(-1e30)]


@narrowing
def test_infinity_and_nan_travel_as_they_are(put, name, dtype):
    values = [np.inf, -np.inf, np.nan, 1]
    survives, errors = rounded(put, name, values, dtype)
    assert np.array_equal(survives, values, equal_nan=True)
    assert not errors.any()


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


@pytest.mark.parametrize(("name", "dtype"), EXACT)
def test_values_as_narrow_as_the_format_are_left_alone(put, name, dtype):
    values = put(np.array([1e-45, 0.1, 3e38], dtype))
    wire = wire_for(name, values.dtype)
    with waits(0):
        survives, error = wire.round(values)
        message = wire.write(values)
        arrived = wire.read(message)
    assert survives is values
    assert error is None
    assert address(values) == address(message) == address(arrived)


@pytest.mark.parametrize(("name", "dtype"), EXACT + NARROWING)
def test_an_entry_takes_four_bytes_beside_its_value_and_is_viewed_where_that_is_possible(put, name, dtype):
    wire = wire_for(name, np.dtype(dtype))
    assert wire.dtype.itemsize == min(np.dtype(dtype).itemsize, np.dtype(FORMATS.get(name, dtype)).itemsize)
    for count in (0, 1, 4, 7):
        entries = np.arange(count, dtype=np.int32) * 3, np.arange(count).astype(dtype) - 3
        given_ = put(entries[0]), put(entries[1])
        with waits(0):
            message = wire.pack(given_)
            indices, values = arrived = wire.unpack(message)
        assert message.nbytes == count * wire.entry == count * (4 + wire.dtype.itemsize)
        assert digest(*arrived) == digest(*entries)
        if count:
            end = count * wire.dtype.itemsize
            assert (address(values) == address(message)) == (wire.dtype == dtype)
            assert (address(indices) == address(message) + end) == (end % 4 == 0)
            assert address(values) % values.itemsize == address(indices) % 4 == 0


def test_joined_parts_keep_their_dtypes(put):
    parts = [(np.array([1], np.int32), np.array([2.5], np.float32)), (np.empty(0, np.int32), np.empty(0, np.float32))]
    indices, values = map(to_host, concatenate([(put(one), put(other)) for one, other in parts]))
    assert (indices.dtype, values.dtype, indices.tolist(), values.tolist()) == (np.int32, np.float32, [1], [2.5])
