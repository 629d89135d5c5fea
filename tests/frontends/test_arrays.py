"""Arrays are averaged over the ranks, by parts: nothing is lost from call to call, and all ranks get the same."""

from __future__ import annotations

import copy
import functools
import operator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from exchanges import every_device
from hypothesis import given
from hypothesis import strategies as st
from laws import content, digest, everywhere, examples, same_bits, summed
from mpi4py import MPI
from rules import eighths

from horovod_sparse.config import Compression, Sparse
from horovod_sparse.frontends.arrays import SparseAllreduce
from horovod_sparse.kernels import to_host

law = pytest.mark.law

# One for each kind of state: none, thresholds, random positions, velocities, blocks that stay, a schedule's.
COMPRESSIONS = [
    "topka:density=0.05",
    "gtopk:density=0.05",
    "oktopk:density=0.05,tau_threshold=4",
    "randomk:density=0.05",
    "dgc:density=0.05",
    "stable:density=0.1,block=8,refresh=3",
    "accordion:density=0.05,interval=1,steps_per_epoch=2",
]
every_compression = pytest.mark.parametrize("compression", COMPRESSIONS)
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def own(transport, *seed):
    return np.random.default_rng([*seed, transport.rank])


def residual(average):
    return average.state_dict()["pipeline"]["memory"]["residual"].astype(np.float64)


def total(transport, array):
    return summed(transport, np.asarray(array, np.float64))


# --- what is averaged ---


@law
@pytest.mark.parametrize("compression", ["topka:density=0.05", "gtopk:density=0.05", "oktopk:density=0.05"])
def test_results_and_residuals_are_the_sum_of_the_arrays_whatever_the_learning_rate_does(transport, compression):
    average, generator, ranks = SparseAllreduce(300, compression, transport), own(transport, 1), transport.size
    arrays, results = np.zeros((2, 3, 100))
    for number in range(30):
        array, rate = generator.standard_normal((3, 100)), (1.0, 0.25, 2.0, 0.5)[number % 7 // 2]
        result = average(array, learning_rate=rate)
        assert same_bits(transport, result)
        arrays += rate * array
        results += rate * result
    kept = rate * total(transport, residual(average)).reshape(3, 100)
    assert everywhere(transport, np.allclose(ranks * results + kept, total(transport, arrays), rtol=1e-12, atol=1e-12))
    assert everywhere(transport, 0 < np.count_nonzero(result) < 2 * ranks * 15)


@law
@pytest.mark.parametrize("compression", ["topka:density=1.0", "dense", "oktopk:density=0.1,dense_steps=9"])
def test_what_travels_whole_is_the_plain_mean(transport, compression):
    average, factor = SparseAllreduce(100, compression, transport), 1 / transport.size
    for number in range(3):
        array = eighths(own(transport, number), 100).astype(np.float64)
        assert everywhere(transport, np.array_equal(average(array), factor * summed(transport, array)))


@law
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_with_momentum_each_ranks_array_is_clipped_by_its_own_norm(transport, dtype):
    ranks = transport.size
    average = SparseAllreduce(64, "dgc:density=1.0,max_norm=1.0", transport)
    array = (own(transport, 7).standard_normal(64) * (1 + transport.rank)).astype(dtype)
    before = array.copy()
    factor = 1 / np.sqrt(ranks) / np.linalg.norm(array.astype(np.float64))
    expected = summed(transport, factor * array.astype(np.float64)) / ranks
    assert everywhere(transport, np.allclose(average(array).astype(np.float64), expected, rtol=0.01, atol=1e-3))
    assert everywhere(transport, np.array_equal(array, before))
    whole = average(np.full(64, np.nan, dtype))
    assert everywhere(transport, not np.isfinite(whole.astype(np.float64)).any())


@law
@given(
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["C", "F", "strided", "read-only"]),
)
@examples(30)
def test_the_result_has_the_shape_and_dtype_of_the_array_which_is_not_changed(transport, shape, dtype, layout):
    whole = eighths(own(transport, 3), (*shape, 2)).astype(dtype)
    array = whole[..., 0] if layout == "strided" else whole[..., 0].copy("F" if layout == "F" else "C")
    array.flags.writeable = layout != "read-only"
    before = array.tobytes()
    result = SparseAllreduce(array.size, "dense", transport)(array)
    mean, ours = total(transport, array) / transport.size, result.astype(np.float64)
    assert everywhere(transport, (result.shape, result.dtype) == (shape, np.dtype(dtype)))
    assert everywhere(transport, np.all(np.abs(ours - mean) <= 2 * float(ml_dtypes.finfo(dtype).eps) * np.abs(mean)))
    assert everywhere(transport, array.tobytes() == before and not np.shares_memory(array, result))


@every_device
def test_arrays_of_the_device_get_the_bits_of_those_of_the_host(transport, put):
    arrays = own(transport, 4).standard_normal((5, 8, 40)).astype(np.float32)
    there, here = (SparseAllreduce(320, "topka:density=0.05", transport) for _ in range(2))
    for array in arrays:
        given_, expected = put(array), here(array)
        result = there(given_)
        assert type(result) is type(given_)
        assert everywhere(transport, digest(result) == digest(expected))
        assert everywhere(transport, np.array_equal(to_host(given_), array))
    assert everywhere(transport, content(there.state_dict()) == content(here.state_dict()))


@law
def test_one_rank_alone_selects_too_and_small_arrays_are_no_exception():
    average = SparseAllreduce(10, "topka:density=0.1", MPI.COMM_SELF)
    results = [average(np.arange(10.0)).tolist() for _ in range(2)]
    assert results == [[0] * 9 + [9], [0] * 8 + [16, 0]]


def test_the_density_follows_the_epoch(transport):
    """As many entries are left out as the residual keeps of a first array without zeros."""
    compression, array = "topka:schedule=warmup,warmup_densities=(0.5,0.1)", own(transport, 6).uniform(1, 2, 1000)
    kept = []
    for epoch in range(3):
        average = SparseAllreduce(1000, compression, transport)
        average(array, epoch=epoch)
        kept.append(np.count_nonzero(residual(average)))
    assert everywhere(transport, kept == [500, 900, 990])
    with pytest.raises(RuntimeError, match="a SparseAllreduce takes epoch=epoch"):
        average(array)


# --- state ---


@law
@every_compression
def test_a_state_goes_on_with_the_same_bits(transport, compression):
    """In an object that was used, in one that was not, and in one that gave the state on before its first call."""
    used, new, third, one = (SparseAllreduce(200, compression, transport) for _ in range(4))
    arrays = own(transport, 7).standard_normal((9, 200)).astype(np.float32)
    for array in arrays[:4]:
        one(array, learning_rate=0.5)
    used(arrays[5])
    state = one.state_dict()
    before = content(state)
    used.load_state_dict(state)
    new.load_state_dict(state)
    third.load_state_dict(new.state_dict())
    assert content(new.state_dict()) == before
    for array in arrays[4:]:
        results = [average(array, learning_rate=0.25) for average in (one, used, new, third)]
        assert everywhere(transport, all(np.array_equal(result, results[0]) for result in results))
    assert everywhere(transport, content(new.state_dict()) == content(used.state_dict()) == content(one.state_dict()))
    assert everywhere(transport, content(state) == before)  # a copy


def test_a_state_of_something_else_is_refused(transport):
    def begun(size=100, compression="topka:density=0.1", dtype="f4"):
        average = SparseAllreduce(size, compression, transport)
        average(np.ones(size, dtype))
        return average

    average = begun()
    for other, what in [
        (begun(size=50), "size 50.* 100"),
        (begun(compression="topka:density=0.2"), "compression .*0.2.*0.1"),
        (begun(dtype="f8"), "precision 'float64'.* 'float32'"),
        (SparseAllreduce(100, "topka:density=0.1", transport), "precision ''.* 'float32'"),
    ]:
        with pytest.raises(ValueError, match=rf"rank {transport.rank}: the state is of {what}.*: load what the same"):
            average.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="the state is of rank 99"):
        average.load_state_dict({**average.state_dict(), "rank": 99})


def test_a_state_that_only_one_rank_has_loaded_is_noticed(transport):
    average, other = (SparseAllreduce(100, "randomk:density=0.1", transport) for _ in range(2))
    last = transport.size - 1
    other(np.ones(100))
    if transport.rank == last:
        average.load_state_dict(other.state_dict())
    if transport.size == 1:
        assert np.array_equal(average(np.ones(100)), other(np.ones(100)))
        return
    with pytest.raises(ValueError, match=rf"number of the call differs .* rank {last} has 1, rank 0 has 0"):
        average(np.ones(100))


def places(state, path=()):
    """All paths to values that are no dicts, and to the dicts themselves."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from places(value, (*path, key))
    if path:
        yield path


def changed(state, path, change):
    """A copy of a state in which one value is replaced, or left out where the change gives nothing."""
    state = copy.deepcopy(state)
    *above, last = path
    place = functools.reduce(operator.getitem, above, state)
    place[last] = change(place[last])
    if place[last] is ...:
        del place[last]
    return state


def poisoned(value):
    floats = isinstance(value, np.ndarray) and value.size and value.dtype.kind == "f"
    return np.full_like(value, np.nan) if floats else -1


QUANTIZED = "topka:density=0.1,memory=improved,version=1,compressor=quantize"
# The epoch before the first one is -1. A sum that has overflowed ends with its epoch.
NOT_IMPOSSIBLE = [("pipeline", "schedule", "epoch"), ("pipeline", "schedule", "sum")]
DAMAGES = {
    "left out": lambda value: ...,
    "nothing": lambda value: [] if value is None else "?",
    "another type": lambda value: [value] if isinstance(value, dict) else {"value": value},
    "shorter": lambda value: value[:-1] if isinstance(value, np.ndarray) and len(value) > 7 else {1: 2},
    "longer": lambda value: np.tile(value, 2) if isinstance(value, np.ndarray) and len(value) else {1: 2},
    "another dtype": lambda value: value.astype(np.float16) if isinstance(value, np.ndarray) else {1: 2},
    "impossible number": poisoned,
}


@law
@pytest.mark.parametrize("compression", [*COMPRESSIONS, QUANTIZED, "topka:density=0.1,schedule=gravac"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(transport, compression, damage):
    used, twin = (SparseAllreduce(200, compression, transport) for _ in range(2))
    arrays = own(transport, 15).standard_normal((3, 200)).astype(np.float32)
    for average in (used, twin):
        average(arrays[0], epoch=0)
    state = twin.state_dict()
    for path in places(state):
        if path[0] == "compression" or (damage == "impossible number" and path in NOT_IMPOSSIBLE):
            continue
        bad = changed(state, path, DAMAGES[damage])
        with pytest.raises(ValueError, match=f"^rank {transport.rank}: ") as error:
            used.load_state_dict(bad)
        if len(path) > 1 and damage not in ("shorter", "longer"):
            assert path[-1] in str(error.value)
    assert everywhere(transport, content(used.state_dict()) == content(state))
    for array in arrays[1:]:
        results = [average(array, epoch=0) for average in (used, twin)]
        assert everywhere(transport, np.array_equal(*results))


@law
@pytest.mark.parametrize("state", [None, [], {}, {"size": 100}, "state"])
def test_other_objects_are_no_states(transport, state):
    with pytest.raises(ValueError, match=r"a state must be a dict with the keys .*'size'\], not .*: load what state_d"):
        SparseAllreduce(100, "topka:density=0.1", transport).load_state_dict(state)


@law
def test_a_damaged_state_from_before_the_first_call_is_an_error_on_all_ranks_in_it(transport):
    average, twin = (SparseAllreduce(100, "topka:density=0.1", transport) for _ in range(2))
    array, last = own(transport, 16).random(100), transport.size - 1
    twin(array)
    good, mine = twin.state_dict(), transport.rank == last
    bad = changed(good, ("pipeline", "unit"), lambda _: np.nan)
    average.load_state_dict(bad if mine else good)
    message = r"bucket 0 cannot load this state: .*state\['unit'\] is nan"
    with pytest.raises(
        ValueError, match=rf"^rank {last}: {message}" if mine else f"rank {last} could not begin: {message}"
    ):
        average(array)
    average.load_state_dict(good)
    assert everywhere(transport, np.array_equal(average(array), twin(array)))


def test_a_state_without_a_pipeline_has_no_precision(transport):
    average = SparseAllreduce(100, "topka:density=0.1", transport)
    fresh = average.state_dict()
    for change in ({"precision": "float32"}, {"pipeline": {}}, {"precision": "float16", "pipeline": {}}):
        with pytest.raises(ValueError, match=r"the state has precision '.*', which does not fit its pipeline"):
            average.load_state_dict({**fresh, **change})
    average.load_state_dict(fresh)


# --- what goes wrong ---


MISTAKES = {
    "size": (lambda a: a[:-1], r"for arrays of 100 elements, not 99 \(shape \(99,\)\): create one for each size"),
    "dtype": (lambda a: a.astype(np.int32), r"must be float64, .*, not int32: use array.astype"),
    "object": (lambda a: a.astype(object), r"must be float64, .*, not object: use array.astype"),
    "complex": (lambda a: a.astype(np.complex64), r"not complex64: use array.view\('float32'\), .* twice the size"),
    "byte order": (lambda a: a.astype(">f4"), r"not >f4: use array.astype"),
    "precision": (
        lambda a: a.astype(np.float64),
        "residuals of float32 on cpu, but the array needs float64 on cpu: create one for each",
    ),
    "list": (lambda a: a.tolist(), r"not builtins.list: np.asarray\(array\) converts lists"),
    "scalar": (lambda a: a[0], r"not numpy.float32: np.asarray\(array\)"),
    "matrix": (
        lambda a: a[None].view(np.matrix),
        r"plain NumPy array, not numpy.*matrix, .*: pass np.asarray\(array\)",
    ),
    "masked": (np.ma.masked_array, r"plain NumPy array, not numpy.ma.*MaskedArray, .*array.filled\(0\)"),
    "subclass": (lambda a: a.view(np.recarray), r"plain NumPy array, not numpy.*recarray"),
}
RATES = [np.nan, np.inf, -0.5, 10**400, None, True, np.True_, "0.1", 1j, np.array(0.1), np.ones(3)]
EPOCHS = [0.5, -1, 2**31, 2**70, True, "1", np.array(1)]


@law
@pytest.mark.parametrize(
    ("make", "conditions", "message"),
    [
        *(pytest.param(make, {}, message, id=name) for name, (make, message) in MISTAKES.items()),
        *((None, {"learning_rate": one}, "learning_rate must be a finite number .*: pass float") for one in RATES),
        *((None, {"epoch": one}, "epoch must be None or an integer from 0 to .*: pass int") for one in EPOCHS),
    ],
)
def test_a_mistake_of_one_rank_is_an_error_on_all_and_changes_nothing(transport, make, conditions, message):
    average, array = SparseAllreduce(100, "topka:density=0.1", transport), own(transport, 8).random(100, np.float32)
    average(array)
    before, last = content(average.state_dict()), transport.size - 1
    mine = transport.rank == last
    given_ = make(array) if mine and make else array
    prefix = f"rank {last}: " if mine else f"rank {transport.rank}: rank {last} could not begin: "
    with pytest.raises((TypeError, ValueError) if mine else ValueError, match=f"^{prefix}.*{message}"):
        average(given_, **(conditions if mine else {}))
    assert everywhere(transport, content(average.state_dict()) == before)
    assert same_bits(transport, average(array))


def test_ranks_that_differ_are_told_so(transport):
    average, last = SparseAllreduce(100, "topka:density=0.1", transport), transport.rank == transport.size - 1
    if transport.size == 1:
        assert average(np.ones(100), learning_rate=0.5).sum() == 10
        return
    with pytest.raises(ValueError, match=r"learning rate differs .* has 0.5, rank 0 has 1.0"):
        average(np.ones(100), learning_rate=0.5 if last else 1.0)
    with pytest.raises(ValueError, match=r"dtype differs .* has float16, rank 0 has float32"):
        average(np.ones(100, "f2" if last else "f4"))
    with pytest.raises(ValueError, match=r"size differs .* has 7, rank 0 has 100"):
        SparseAllreduce(7 if last else 100, "topka:density=0.1", transport)
    with pytest.raises(ValueError, match=r"compression.density differs .* has 0.2, rank 0 has 0.1"):
        SparseAllreduce(100, Sparse.of(0.2 if last else 0.1), transport)


@law
def test_a_size_that_is_wrong_on_one_rank_is_an_error_on_all(transport):
    last = transport.size - 1
    with pytest.raises(ValueError, match=rf"rank {last}( could not begin)?: size must be an integer .*, not True"):
        SparseAllreduce(True if transport.rank == last else 1, "topka", transport)


def test_numbers_of_numpy_and_fractions_are_numbers(transport):
    one, other = (SparseAllreduce(size, "topka:density=0.1", transport) for size in (np.int32(100), 100))
    array = own(transport, 13).random(100, np.float32)
    for rate, same in [(np.float32(0.5), 0.5), (Fraction(1, 4), 0.25), (np.int64(2), 2)]:
        assert everywhere(
            transport,
            np.array_equal(one(array, learning_rate=rate, epoch=np.int8(3)), other(array, learning_rate=same, epoch=3)),
        )


@pytest.mark.parametrize("compression", ["topka:density=0.1", "dgc:density=0.1,max_norm=0.5"])
def test_an_array_in_a_file_is_an_array(transport, compression, tmp_path):
    array = own(transport, 14).random((20, 5), np.float32)
    path = tmp_path / f"{transport.rank}.npy"
    np.save(path, array)
    mapped = np.load(path, mmap_mode="r")
    one, other = (SparseAllreduce(100, compression, transport) for _ in range(2))
    for _ in range(2):
        result = one(mapped)
        assert everywhere(transport, type(result) is np.ndarray and np.array_equal(result, other(array)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, "topka"), ValueError, "size must be an integer from 1 to 2147483647, not 0: pass array.size"),
        ((2**31, "topka"), ValueError, "size must be an integer .*, not 2147483648"),
        ((1.5, "topka"), ValueError, "size must be an integer .*, not 1.5"),
        ((np.True_, "topka"), ValueError, "size must be an integer .*, not np.True_"),
        ((np.array(9), "topka"), ValueError, r"size must be an integer .*, not array\(9\)"),
        ((9, "none"), ValueError, "'none' is not a sparse compression: .*'dense' averages without compression"),
        ((9, "fp16"), ValueError, "'fp16' is not a sparse compression"),
        ((9, Compression), ValueError, "is not a sparse compression"),
        ((9, "gzip"), ValueError, "unknown compression 'gzip'; known are"),
        ((9, "topka", MPI.COMM_NULL), TypeError, "comm must be an intracommunicator of mpi4py"),
    ],
)
def test_arguments_are_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        SparseAllreduce(*arguments)


# --- communicators and messages ---


@pytest.mark.mpi
@law
def test_messages_of_the_program_are_not_met(comm):
    """Neither does a receive of any message take one of ours, nor do we take one that was meant for it."""
    note, rank = np.zeros(1), comm.Get_rank()
    average = SparseAllreduce(100, "oktopk:density=0.1", comm)
    waiting = comm.Irecv(note)  # from anybody, whatever the tag
    sent = comm.Isend(np.full(1, 7.0), (rank + 1) % comm.Get_size(), 1)
    assert same_bits(comm, average(np.random.default_rng([rank, 11]).random(100)))
    MPI.Request.Waitall([waiting, sent])
    assert everywhere(comm, note[0] == 7)


@pytest.mark.mpi
def test_groups_of_ranks_average_among_themselves(comm):
    rank = comm.Get_rank()
    group = comm.Split(rank % 2)
    average = SparseAllreduce(3, "dense", group)
    members = range(rank % 2, comm.Get_size(), 2)
    assert everywhere(comm, np.allclose(average(np.full(3, float(rank))), np.mean(members)))
    group.Free()
    assert everywhere(comm, average(np.ones(3)).tolist() == [1, 1, 1])  # has one of its own


def test_traffic_is_that_of_the_selection(transport):
    average, ranks = SparseAllreduce(10_000, "topka:density=0.01", transport), transport.size
    assert average.traffic.bytes_sent == 0
    average(own(transport, 12).random(10_000, np.float32))
    assert average.traffic.bytes_sent == (16 + 24 + 8 * 100) * (ranks - 1)  # two headers
    assert average.compression == Compression.topka(density=0.01)
