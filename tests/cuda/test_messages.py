"""Arrays of the device get to MPI and back, through pinned memory or directly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cupy
import launch
import numpy as np
import pytest
from devices import emulated, on_device, to_host, waits
from exchanges import AWARE, STAGED, WAYS, allocations, through
from laws import everywhere, same_bits
from mpi4py import MPI

from horovod_sparse import cudaaware, measure, staging
from horovod_sparse.collectives import messenger
from horovod_sparse.collectives.messenger import Messenger
from horovod_sparse.consensus import consensus_of
from horovod_sparse.pinned import Pool
from horovod_sparse.staging import Staged

LIKE = cupy.empty(0, np.float32)


def bytes_of(length: int, value: int) -> Any:
    return on_device(np.full(length, value, np.uint8))


def equal(array: Any, length: int, value: int) -> bool:
    return type(array) is cupy.ndarray and np.array_equal(to_host(array), np.full(length, value, np.uint8))


# --- whether MPI is CUDA-aware -------------------------------------------------------------------------------------


@pytest.fixture
def undecided() -> Any:
    cudaaware.cuda_aware.cache_clear()
    yield
    cudaaware.cuda_aware.cache_clear()


@pytest.mark.parametrize(
    ("setting", "says", "expected"),
    [("0", True, False), ("auto", True, True), ("auto", False, False), ("auto", None, False), (None, True, True)],
)
def test_the_environment_decides_or_the_library(monkeypatch, undecided, setting, says, expected):
    monkeypatch.delenv(cudaaware.VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(cudaaware.VARIABLE, setting)
    asked = []
    monkeypatch.setattr(cudaaware, "ask_library", lambda: asked.append(1) or says)
    assert [cudaaware.cuda_aware() for _ in range(3)] == [expected] * 3
    assert len(asked) == (setting != "0")


@pytest.mark.parametrize("setting", ["", "yes", "2", "AUTO"])
def test_any_other_setting_is_refused(monkeypatch, undecided, setting):
    monkeypatch.setenv(cudaaware.VARIABLE, setting)
    with pytest.raises(ValueError, match=f"HOROVOD_SPARSE_CUDA_AWARE must be 0, 1 or auto, not '{setting}'"):
        cudaaware.cuda_aware()


def test_nothing_is_decided_for_arrays_of_the_host(monkeypatch):
    monkeypatch.setattr(staging, "cuda_aware", lambda: pytest.fail("asked"))
    assert Messenger(MPI.COMM_SELF).sum(np.arange(3.0)).tolist() == [0, 1, 2]


INSIST = """
import os, sys
mpi, *folders = sys.argv[1:]
sys.path[:0] = folders
os.environ.update(HOROVOD_SPARSE_CUDA_AWARE="1", EMULATED_CUDA_AWARE_MPI=mpi, PYTHONPATH=os.pathsep.join(folders))
from mpi4py import MPI
from horovod_sparse import cudaaware
for _ in range(2):
    try:
        print(cudaaware.cuda_aware())
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("mpi", "answer"),
    [
        ("yes", "True"),
        ("crash", r"a try ended with status -6"),
        ("garbage", "of 1 bytes, others arrived than were sent"),
        ("", "a try ended with status 1"),
    ],
    ids=["yes", "crash", "garbage", "refused"],
)
def test_a_wrong_setting_is_an_error_and_no_crash(mpi, answer):
    """Also below mpirun, whose rank the process that tries it must not become."""
    here = Path(__file__).parent
    folders = [str(here.parents[1]), *([str(here / "emulation")] if emulated() else [])]
    result = launch.python("-c", INSIST, mpi, *folders, ranks=1 if mpi in ("yes", "crash") and emulated() else None)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.strip().splitlines()
    assert first == second
    if emulated():
        assert answer in first
    assert first == "True" or "HOROVOD_SPARSE_CUDA_AWARE is 1, but this MPI cannot send" in first
    assert first == "True" or "Set it to 0 or unset it" in first


# --- pinned memory -------------------------------------------------------------------------------------------------


def test_blocks_are_used_again_and_grow_by_doubling():
    with allocations() as sizes:
        pool = Pool()
        for nbytes in range(5000, 40_000, 1000):
            block = pool.take(nbytes)
            assert block.size >= nbytes
            pool.give_back(block)
    assert sizes == [8192, 16384, 32768, 65536]
    assert [block.size for blocks in pool._idle.values() for block in blocks] == [65536]


def test_blocks_in_use_are_not_lent_again():
    with allocations() as sizes:
        pool = Pool()
        for _ in range(5):
            blocks = [pool.take(nbytes) for nbytes in (10, 0, 5000, 10)]
            assert len({block.view(1).ctypes.data for block in blocks}) == 4
            for block in blocks:
                pool.give_back(block)
    assert sizes == [4096, 4096, 8192, 4096]


def test_a_block_is_not_written_before_the_device_has_read_it():
    pool, arrays = Pool(), [cupy.empty(100_000, np.uint8) for _ in range(6)]
    for value, array in enumerate(arrays):
        block = pool.take(array.nbytes)
        block.view(array.nbytes)[:] = value
        block.unload(array)
        pool.give_back(block)
    assert all(equal(array, 100_000, value) for value, array in enumerate(arrays))


def test_a_short_block_is_not_freed_before_the_device_has_read_it():
    pool = Pool()
    block = pool.take(4096)
    block.unload(cupy.empty(4096, np.uint8))
    pool.give_back(block)
    with waits(1):
        pool.take(10_000)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("size", [0, 1, 8, 9, 16, 17, 100])
def test_a_sum_is_staged_in_pieces_of_one_size(monkeypatch, size, dtype):
    monkeypatch.setattr(staging, "PIECE_BYTES", 8 * np.dtype(dtype).itemsize)
    values = np.arange(size, dtype=dtype)
    array, total = on_device(values), cupy.empty(size, dtype)
    with allocations() as blocks:
        for _ in range(3):
            total.fill(-1)
            Staged().sum(MPI.COMM_SELF, array, total)
            assert to_host(total).tolist() == to_host(array).tolist() == values.tolist()
    assert len(blocks) == min(2, -(-size // 8))


def test_messages_that_leave_together_are_waited_for_once():
    staged, messages = Staged(), [bytes_of(1000, value) for value in range(5)]
    with waits(1):
        parcels = list(staged.outgoing(messages))
    for value, parcel in enumerate(parcels):
        assert np.array_equal(parcel.buffer, np.full(1000, value))
        parcel.release()


# --- between ranks -------------------------------------------------------------------------------------------------


@pytest.fixture(params=WAYS)
def way(request, comm):
    with through(request.param, comm.Get_rank()):
        yield request.param


@pytest.mark.mpi
@pytest.mark.law
@pytest.mark.parametrize("length", [0, 3, 100_000])
def test_messages_arrive_whole_and_in_order(comm, way, length):
    channel = Messenger(comm)
    right, left = (channel.rank + 1) % channel.ranks, (channel.rank - 1) % channel.ranks
    for _ in range(3):
        outgoing = [bytes_of(length + i, channel.rank + i) for i in range(3)]
        sends = channel.send_all(outgoing, [right] * 3, LIKE)
        arriving = [channel.receive(left, LIKE) for _ in range(3)]
        assert everywhere(comm, all(equal(one.wait(), length + i, left + i) for i, one in enumerate(arriving)))
        for send in sends:
            send.wait()
    assert channel.traffic.bytes_sent == channel.traffic.bytes_received == 3 * (3 * length + 3)


@pytest.mark.mpi
@pytest.mark.law
@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("lengths", ["equal", "different", "one", "none"])
def test_allgather_gives_every_rank_every_message(comm, way, monkeypatch, ring, lengths):
    monkeypatch.setattr(messenger, "RING_BYTES", 0 if ring else 2**31)
    channel = Messenger(comm)
    length = {
        "equal": [2400] * channel.ranks,
        "different": [500 * rank for rank in range(channel.ranks)],
        "one": [13 if rank == channel.ranks - 1 else 0 for rank in range(channel.ranks)],
        "none": [0] * channel.ranks,
    }[lengths]
    for value in range(3):
        everyones = channel.allgather(bytes_of(length[channel.rank], channel.rank + value), length)
        checks = [equal(one, length[rank], rank + value) for rank, one in enumerate(everyones)]
        assert everywhere(comm, all(checks))


@pytest.mark.mpi
@pytest.mark.law
@pytest.mark.parametrize("length", [0, 5, 10_000])
def test_broadcast_gives_every_rank_the_first_ones_message(comm, way, length):
    channel = Messenger(comm)
    for value in range(3):
        message = bytes_of(length, value) if channel.rank == 0 else LIKE.view(np.uint8)
        assert everywhere(comm, equal(channel.broadcast(message, length), length, value))


@pytest.mark.mpi
@pytest.mark.law
@pytest.mark.parametrize("size", [0, 1, 1000, 4097])
def test_sums_have_the_same_bits_on_every_rank(comm, way, monkeypatch, size):
    monkeypatch.setattr(staging, "PIECE_BYTES", 4096)
    mine = np.random.default_rng(comm.Get_rank()).standard_normal(size)
    exact = np.random.default_rng(comm.Get_rank()).integers(-99, 99, size).astype(np.float32) / 8
    channel = Messenger(comm)
    total, exact_total = channel.sum(on_device(mine)), channel.sum(on_device(exact))
    assert same_bits(comm, to_host(total), to_host(exact_total))
    assert everywhere(comm, np.array_equal(to_host(exact_total), channel.sum(exact)))
    assert everywhere(comm, np.allclose(to_host(total), channel.sum(mine)))


@pytest.mark.mpi
def test_nothing_is_staged_where_mpi_is_aware(comm):
    def exchange() -> None:
        channel = Messenger(comm)
        channel.allgather(bytes_of(100, 1), [100] * channel.ranks)
        channel.sum(cupy.zeros(100, np.float32))

    staged = {}
    for name in (STAGED, AWARE):
        with through(name), allocations() as sizes:
            exchange()
        staged[name] = len(sizes) > 0
    assert staged[STAGED] == (comm.Get_size() > 1)
    assert not staged[AWARE] or not emulated()


@pytest.mark.mpi
@pytest.mark.law
def test_a_small_array_is_summed_where_it_is(comm):
    consensus = consensus_of(comm)
    for values in (np.arange(5), np.random.default_rng(comm.Get_rank()).standard_normal(5)):
        total = consensus(on_device(values))
        assert type(total) is cupy.ndarray
        assert everywhere(comm, np.array_equal(to_host(total), consensus(values)))


# --- what they cost ------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.law
@pytest.mark.parametrize("name", [STAGED, AWARE])
def test_what_auto_needs_is_measured_on_the_device(comm, monkeypatch, name):
    few = {"_ELEMENTS": 1 << 10, "_KERNEL_SECONDS": 1e-6, "_BYTES": (1 << 12, 1 << 14), "_PINGS": 2, "_ROUNDS": 1}
    for figure, value in few.items():
        monkeypatch.setattr(measure, figure, value)
    fresh = comm.Dup()
    for like in (LIKE, cupy.empty(0, np.float64)):
        with through(name):
            link, compute = measure.measure_link(fresh, like), measure.measure_compute(like, fresh)
        assert everywhere(comm, comm.bcast((link, compute)) == (link, compute))
        assert min(compute.select, compute.accumulate, compute.merge, compute.cut) > 0
        assert comm.Get_size() == 1 or link.alpha > 0
        assert measure.measure_link(fresh, like) is link
    monkeypatch.setattr(measure, "_measure_link", lambda comm, like: "the host's")
    assert measure.measure_link(fresh) == "the host's"
    fresh.Free()
