"""Messages: a vector is split exactly into rounded values and errors, on any device."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from devices import waits
from exchanges import HOST, STAGED, through
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import NARROWING
from laws import digest

from horovod_sparse.kernels import to_host
from horovod_sparse.kernels.formats import FORMATS
from horovod_sparse.wire import NEVER, Wire, concatenate

# Beyond float16 and bfloat16, subnormal in either, halfway between two neighbours, and too large for an exact rest.
SPECIAL = [0, -0.0, 65504, 65520, -7e4, 3.395e38, 3.4e38, 6e-8, 2e-8, 1e-40, 1 + 2**-8, 1 + 2**-11, 2**30 + 128, -1e30]
EXACT = [(None, "float32"), (None, "float64"), ("float32", "float32")]
LOGARITHMIC = [(name, dtype) for name in ("log8", "log4") for dtype in ("float32", "float64")]
HEADER = 24

rounding = pytest.mark.parametrize(("name", "dtype"), NARROWING + LOGARITHMIC)
some = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[HOST, STAGED])
def put(request):
    with through(request.param) as put, np.errstate(all="ignore"):
        yield put


def numbers(dtype):
    special = st.sampled_from([float(np.dtype(dtype).type(one)) for one in SPECIAL])
    width = 8 * np.dtype(dtype).itemsize
    return st.lists(st.floats(width=width, allow_nan=False, allow_infinity=False) | special, max_size=20)


def rounded(put, name, values, dtype="float32"):
    """Values and errors, on the host."""
    given_ = put(np.asarray(values, dtype))
    survives, error = map(to_host, Wire.of(name, given_.dtype).round(given_)[:2])
    assert survives.dtype == error.dtype == dtype
    return survives, error


@rounding
@some
@given(data=st.data(), coded_from=st.sampled_from([0, NEVER]))
def test_values_are_split_exactly_into_rounded_value_and_error(put, name, dtype, data, coded_from):
    values = data.draw(numbers(dtype))
    given_ = put(np.asarray(values, dtype))
    survives, errors, wire = Wire.of(name, given_.dtype, coded_from).round(given_)
    survives, errors = to_host(survives), to_host(errors)
    sums = [Fraction(one) + Fraction(error) for one, error in zip(survives.tolist(), errors.tolist(), strict=True)]
    assert sums == [Fraction(float(np.dtype(dtype).type(value))) for value in values]
    indices = np.arange(len(values), dtype=np.int32) * 3
    for part in (slice(None), slice(len(values) // 3, None)):  # a wire that holds a vector holds its parts
        message = wire.pack((put(indices[part]), put(survives[part])))
        arrived = map(to_host, Wire.of(name, given_.dtype).unpack(message, 3 * len(values)))
        assert [one.tobytes() for one in arrived] == [indices[part].tobytes(), survives[part].tobytes()]


@pytest.mark.parametrize("name", ["log8", "log4"])
@pytest.mark.parametrize("values", [[-1e-205], [-1e-46, 1e-46], [-1e-45, -1e-40]])
def test_values_that_become_zero_have_no_sign(put, name, values):
    given_ = put(np.array(values))
    survives, _, wire = Wire.of(name, given_.dtype).round(given_)
    indices = put(np.arange(len(values), dtype=np.int32))
    arrived = Wire.of(name, given_.dtype).unpack(wire.pack((indices, survives)), len(values))[1]
    assert to_host(arrived).tobytes() == to_host(survives).tobytes()


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


@pytest.mark.parametrize(("name", "dtype"), EXACT)
def test_values_in_the_wire_format_are_unchanged(put, name, dtype):
    values = put(np.array([1e-45, 0.1, 3e38], dtype))
    with waits(0):
        survives, error, wire = Wire.of(name, values.dtype).round(values)
        message = wire.pack_all(values, 7)
    indices, arrived = wire.unpack(message, 10)
    assert survives is values
    assert error is None
    assert address(arrived) == address(message) + HEADER
    assert to_host(indices).tolist() == [7, 8, 9]


@pytest.mark.parametrize(("name", "dtype"), EXACT + NARROWING + LOGARITHMIC)
def test_a_message_has_a_header_the_values_and_four_bytes_for_a_plain_index(put, name, dtype):
    widths = {"log8": 1, "log4": 0.5}
    width = widths.get(name) or min(np.dtype(dtype).itemsize, np.dtype(FORMATS.get(name, dtype)).itemsize)
    for count in (0, 1, 4, 7):
        entries = np.arange(count, dtype=np.int32) * 3, np.arange(count).astype(dtype) - 3
        given_ = put(entries[0]), put(entries[1])
        survives, _, wire = Wire.of(name, given_[1].dtype).round(given_[1])
        with waits(0):
            message = wire.pack((given_[0], survives))
        with waits(0 if put is np.asarray else 2 if count else 1):  # for the header, and whether the indices ascend
            indices, values = arrived = wire.unpack(message, 100)
        assert message.nbytes == -(-(HEADER + int(np.ceil(count * width))) // 8) * 8 + 4 * count
        assert digest(*arrived) == digest(entries[0], to_host(survives))
        assert wire.pack_all(survives, 0).nbytes == wire.nbytes_all(count) == message.nbytes - 4 * count
        if count:
            assert (address(values) == address(message) + HEADER) == (width == np.dtype(dtype).itemsize)
            assert address(indices) == address(message) + message.nbytes - 4 * count
            assert address(values) % values.itemsize == address(indices) % 4 == 0


@pytest.mark.parametrize("name", ["log8", "log4"])
@pytest.mark.parametrize("octaves", [0.01, 0.5, 1, 3, 6, 14])
def test_levels_are_as_fine_as_the_range_of_the_magnitudes_allows(put, name, octaves):
    magnitudes = np.exp2(np.linspace(-octaves, 0, 1000)).astype(np.float32) * np.float32(3)
    errors = rounded(put, name, magnitudes)[1]
    bits, steps = int(name[3:]), 2 ** (int(name[3:]) - 1) - 2
    # Of a step in an octave's lower half; half of the levels may be out of use, as steps are powers of two.
    most = np.exp2(min(np.ceil(np.log2((octaves + 1e-6) / (steps - 1))), -3 if bits == 8 else 0))
    inside = magnitudes > 3 * np.exp2(-steps * most)
    assert (np.abs(errors)[inside] <= max(most, 2**-7) / 2 * magnitudes[inside]).all()


@pytest.mark.parametrize("name", ["log8", "log4"])
def test_nonfinite_values_arrive_as_nan_and_affect_only_their_block(put, name):
    given_ = put(np.array([np.inf, -np.inf, np.nan, 1, -2, 0], np.float32))
    survives, errors, wire = Wire.of(name, given_.dtype).round(given_)
    assert not to_host(errors).any()
    _, arrived = wire.unpack(wire.pack((put(np.arange(6, dtype=np.int32)), survives)), 6)
    assert np.array_equal(to_host(arrived), [np.nan, np.nan, np.nan, 1, -2, 0], equal_nan=True)


@some
@given(
    size=st.integers(1, 1500),
    dtype=st.sampled_from(["float32", "float64"]),
    kind=st.sampled_from(["normal", "few", "wide", "zero"]),
    seed=st.integers(0, 2**31),
)
def test_signs_reduce_the_norm_and_can_be_split_between_blocks(put, size, dtype, kind, seed):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(size)
    values *= {"normal": 1, "few": generator.random(size) < 0.01, "wide": np.exp(20 * values), "zero": 0}[kind]
    values = values.astype(dtype)
    survives, errors, wire = Wire.of("sign", values.dtype).round(put(values))
    assert np.allclose(to_host(survives) + to_host(errors), values, rtol=1e-6, atol=1e-6 * np.abs(values).max())
    for first in range(0, size, 256):
        block, left = values[first : first + 256], to_host(errors)[first : first + 256]
        assert np.linalg.norm(left) <= np.linalg.norm(block) * np.sqrt(1 - 1 / 256) + 1e-30
        assert np.unique(np.abs(to_host(survives)[first : first + 256])).size == 1
    cut = generator.integers(0, size // 256 + 1) * 256
    parts = [wire.pack_all(survives[begin:end], begin) for begin, end in ((0, cut), (cut, size))]
    assert [part.size for part in parts] == [wire.nbytes_all(cut), wire.nbytes_all(size - cut)]
    arrived = np.concatenate(list(map(to_host, wire.unpack_values(parts))))
    assert arrived.tobytes() == to_host(survives).tobytes()


@some
@given(
    size=st.integers(1, 1500),
    name=st.sampled_from(["fitted3", "fitted2"]),
    dtype=st.sampled_from(["float32", "float64"]),
    kind=st.sampled_from(["normal", "largest", "one", "few", "wide", "zero"]),
    seed=st.integers(0, 2**31),
)
def test_fitted_levels_leave_an_error_orthogonal_to_the_sent_values(put, size, name, dtype, kind, seed):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(size)
    factors = {"largest": np.abs(values) > 2, "few": generator.random(size) < 0.01, "wide": np.exp(20 * values)}
    values *= factors.get(kind, {"zero": 0}.get(kind, 1))
    values = np.sign(values) if kind == "one" else values.astype(dtype)
    survives, errors, wire = Wire.of(name, np.dtype(dtype), 0).round(put(values.astype(dtype)))
    survives, errors = map(to_host, (survives, errors))
    largest = np.abs(values).max()
    assert np.allclose(survives + errors, values, rtol=1e-6, atol=1e-6 * largest)
    levels, counts = np.unique(np.abs(survives), return_counts=True)
    assert levels.size <= 2 ** (int(name[-1]) - 1)
    # Each level is the mean of a cell, so that squares of levels and errors add up to those of the values.
    arrived, all_ = float(counts @ levels.astype(np.float64) ** 2), float(np.sum(values.astype(np.float64) ** 2))
    assert np.isclose(np.sum(errors.astype(np.float64) ** 2), all_ - arrived, rtol=1e-4, atol=1e-5 * all_)
    assert arrived >= all_ / size * (1 - 1e-5)
    cut, indices = generator.integers(0, size + 1), np.arange(size, dtype=np.int32)
    for part in (slice(0, cut), slice(cut, size)):
        message = wire.pack((put(indices[part]), put(survives[part])))
        assert wire.pack_all(put(survives[part]), 0).size == wire.nbytes_all(survives[part].size)
        found = map(to_host, Wire.of(name, np.dtype(dtype)).unpack(message, size))
        assert [one.tobytes() for one in found] == [indices[part].tobytes(), survives[part].tobytes()]


def test_levels_are_fitted_to_the_magnitudes(put):
    """Two narrow groups of magnitudes lose nearly nothing in 2 bits."""
    generator = np.random.default_rng(0)
    values = np.concatenate([generator.normal(1, 0.01, 900), generator.normal(-10, 0.1, 100)]).astype(np.float32)
    generator.shuffle(values)
    for name in ("fitted2", "fitted3"):
        errors = rounded(put, name, values)[1]
        assert np.linalg.norm(errors) < 0.02 * np.linalg.norm(values)
    assert np.linalg.norm(rounded(put, "log4", values)[1]) > np.linalg.norm(errors)


def test_few_indices_are_sent_plain_and_many_coded(put):
    wire = Wire.of(None, np.dtype(np.float32), coded_from=100)
    sizes = []
    for count in (99, 100, 1000):
        message = wire.pack((put(np.arange(0, 100 * count, 100, dtype=np.int32)), put(np.ones(count, np.float32))))
        sizes.append((message.nbytes - HEADER) / count)
    assert sizes[0] >= 8
    assert all(size < 5.5 for size in sizes[1:])


def message_of(name, indices, coded):
    values = np.random.default_rng(0).standard_normal(len(indices)).astype(np.float32)
    survives, _, wire = Wire.of(name, values.dtype, 0 if coded else NEVER).round(values)
    return wire, wire.pack((indices, survives))


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("name", [None, "bfloat16", "log8", "log4", "sign", "fitted3", "fitted2"])
def test_damaged_messages_are_refused_or_are_others_of_the_same_region(put, name, coded):
    """Bits that are flipped, in the header and behind it; bytes that are missing; bytes of no message."""
    generator, end, refused = np.random.default_rng(5), 5000, 0
    indices = np.sort(generator.choice(end, 60, replace=False)).astype(np.int32)
    wire, message = message_of(name, indices, coded)
    damaged = [message[:length] for length in (0, 7, HEADER - 1, HEADER, message.size - 8, message.size - 1)]
    damaged += [generator.integers(0, 256, size).astype(np.uint8) for size in (0, 24, 400)]
    for place in [*range(8 * HEADER), *generator.integers(0, 8 * message.size, 200)]:
        damaged.append(message.copy())
        damaged[-1][place // 8] ^= 1 << place % 8
    for one in damaged if put is np.asarray else damaged[::8]:
        try:
            found, values = map(to_host, wire.unpack(put(one), end))
        except ValueError:
            refused += 1
            continue
        assert found.size == values.size
        assert (np.diff(found) > 0).all()
        assert found.size == 0 or (found[0] >= 0 and found[-1] < end)
    assert refused > len(damaged) // 20


def test_errors_describe_what_is_wrong_with_a_message(put):
    wire, message = message_of(None, np.arange(9, dtype=np.int32), coded=True)
    other, _ = message_of("log8", np.arange(9, dtype=np.int32), coded=True)
    newer = message.copy()
    newer[3] = ord("2")
    for given_, by, end, words in (
        (message, other, 9, "same settings on all ranks"),
        (newer, wire, 9, "same version of horovod_sparse"),
        (message[:20], wire, 9, "fewer than the 24 of a header"),
        (message[:40], wire, 9, "too short for 9 values"),
        (message, wire, 8, "indices"),
        (wire.pack_all(np.ones(9, np.float32), 0), wire, 8, "9 positions from 0 on, but the vector has 8"),
    ):
        with pytest.raises(ValueError, match=words):
            by.unpack(put(given_.copy()), end)


def test_joined_parts_keep_their_dtypes(put):
    parts = [(np.array([1], np.int32), np.array([2.5], np.float32)), (np.empty(0, np.int32), np.empty(0, np.float32))]
    indices, values = map(to_host, concatenate([(put(one), put(other)) for one, other in parts]))
    assert (indices.dtype, values.dtype, indices.tolist(), values.tolist()) == (np.int32, np.float32, [1], [2.5])


@pytest.mark.parametrize("coded_from", [0, NEVER])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_positions_can_be_sent_without_values(put, coded_from, count):
    indices = np.arange(count, dtype=np.int32) * 3
    wire = Wire.of("float16", np.dtype(np.float32), coded_from)
    message = wire.pack_indices(put(indices))
    (arrived,) = wire.unpack_indices([message], 150)
    assert np.array_equal(to_host(arrived), indices)
    assert arrived.dtype == np.int32
    if count != 50 or coded_from:
        assert message.nbytes == HEADER + (0 if coded_from == 0 else 4 * count)
    with pytest.raises(ValueError, match="values of kind 7, not 3"):
        wire.unpack(message, 150)
