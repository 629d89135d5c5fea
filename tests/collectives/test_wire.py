"""Wire: a vector is parted into what survives the way and the rounding error, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import wire_laws as laws
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.collectives.wire import Wire, concatenate
from horovod_sparse.vector import SparseVector

narrowing = pytest.mark.parametrize(("name", "dtype"), laws.NARROWING)


@narrowing
@given(data=st.data())
def test_what_survives_and_the_error_are_exactly_the_vector(name, dtype, data):
    laws.check_parts(np.asarray, name, dtype, data.draw(laws.numbers(dtype)))


@narrowing
@given(data=st.data())
def test_what_was_rounded_survives_the_way(name, dtype, data):
    laws.check_survival(np.asarray, name, dtype, data.draw(laws.numbers(dtype)))


@narrowing
@given(data=st.data())
def test_numbers_inside_the_range_go_to_the_nearest(name, dtype, data):
    laws.check_nearest(np.asarray, name, dtype, data.draw(laws.numbers("float32")))


@pytest.mark.parametrize(("name", "values"), [("float16", [65519, -65521, 1e8]), ("bfloat16", [3.4e38, -3.4e38])])
def test_numbers_beyond_the_range_saturate(name, values):
    laws.check_saturation(np.asarray, name, values)


def test_where_the_rest_could_not_be_held_everything_stays_behind():
    laws.check_what_stays_behind(np.asarray)


@narrowing
def test_infinity_and_nan_travel_as_they_are(name, dtype):
    laws.check_not_finite(np.asarray, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), [(None, "float32"), (None, "float64"), ("float32", "float32")])
def test_values_as_narrow_as_the_format_are_left_alone(name, dtype):
    vector = laws.sparse(np.asarray, [1e-45, 0.1, 3e38], dtype)
    rounded, error = Wire(name).round(vector)
    assert rounded is vector
    assert len(error) == 0
    assert np.shares_memory(Wire(name).write(vector.values), vector.values)


def test_a_vector_without_indices_is_left_alone():
    vector = SparseVector.full(np.array([0.1], np.float32))
    rounded, error = Wire("float16").round(vector)
    assert rounded is vector
    assert len(error) == 0


@pytest.mark.parametrize("shared", [True, False])
def test_shared_indices_stay_shared(shared):
    vector = SparseVector(np.array([1], np.int32), np.array([0.1], np.float32), 2, shared=shared)
    assert Wire("bfloat16").round(vector)[0].shared == shared


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", [None, *laws.FORMATS])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_an_entry_takes_four_bytes_beside_its_value(name, dtype, count):
    laws.check_entries(np.asarray, name, dtype, count)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize("name", [None, *laws.FORMATS])
@pytest.mark.parametrize("count", [4, 5])
def test_what_arrived_is_aligned_and_viewed_where_that_is_possible(name, dtype, count):
    wire = Wire(name)
    message = wire.pack(laws.sparse(np.asarray, np.ones(count), dtype).entries)
    indices, values = wire.unpack(message, dtype)
    assert indices.flags.aligned
    assert values.flags.aligned
    assert np.shares_memory(values, message) == (wire.dtype(dtype) == dtype)
    assert np.shares_memory(indices, message) == (count * wire.dtype(dtype).itemsize % 4 == 0)


@pytest.mark.parametrize("name", ["float8", "", 16, ["float16"], "float64"])
def test_an_unknown_format_is_refused(name):
    with pytest.raises(ValueError, match=r"unknown wire format .*; known are: float32, float16, bfloat16"):
        Wire(name)


def test_joined_parts_keep_their_dtypes():
    parts = [(np.array([1], np.int32), np.array([2.5], np.float32)), (np.empty(0, np.int32), np.empty(0, np.float32))]
    indices, values = concatenate(parts)
    assert (indices.dtype, values.dtype, indices.tolist(), values.tolist()) == (np.int32, np.float32, [1], [2.5])
