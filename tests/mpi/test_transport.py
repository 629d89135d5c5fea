"""Ways to MPI: staged arrays of the device go through pinned memory in pieces; others go as they are."""

from __future__ import annotations

import numpy as np
import pytest
from devices import cupy, emulated, on_device, waits
from exchanges import AWARE, HOST, STAGED, WAYS, allocations, through
from mpi4py import MPI

from horovod_sparse.kernels import to_host
from horovod_sparse.mpi import transport
from horovod_sparse.mpi.messenger import Messenger
from horovod_sparse.mpi.transport import Staged


def test_nothing_is_decided_for_arrays_of_the_host(monkeypatch):
    monkeypatch.setattr(transport, "cuda_aware", lambda: pytest.fail("asked"))
    assert Messenger(MPI.COMM_SELF).sum(np.arange(3.0)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("size", [0, 1, 8, 9, 16, 17, 100])
def test_a_sum_is_staged_in_pieces_of_one_size(monkeypatch, size, dtype):
    monkeypatch.setattr(transport, "PIECE_BYTES", 8 * np.dtype(dtype).itemsize)
    values = np.arange(size, dtype=dtype)
    array, total = on_device(values), cupy.empty(size, dtype)
    with allocations() as blocks:
        for _ in range(3):
            total.fill(-1)
            Staged().sum(MPI.COMM_SELF, array, total)
            assert to_host(total).tolist() == to_host(array).tolist() == values.tolist()
    assert len(blocks) == min(2, -(-size // 8))


def test_messages_that_leave_together_are_waited_for_once():
    messages = [on_device(np.full(1000, value, np.uint8)) for value in range(5)]
    with waits(1):
        parcels = list(Staged().outgoing(messages))
    for value, parcel in enumerate(parcels):
        assert np.array_equal(parcel.buffer, np.full(1000, value))
        parcel.release()


@pytest.mark.mpi
@pytest.mark.parametrize("way", sorted({HOST, STAGED, AWARE} & set(WAYS)))
def test_only_what_mpi_cannot_take_is_staged(comm, way):
    with through(way) as put, allocations() as sizes:
        channel = Messenger(comm)
        channel.allgather(put(np.ones(100, np.uint8)), [100] * channel.ranks)
        channel.sum(put(np.zeros(100, np.float32)))
    if way == STAGED:
        assert (len(sizes) > 0) == (comm.Get_size() > 1)
    elif way == HOST or emulated():
        assert sizes == []


@pytest.mark.mpi
@pytest.mark.parametrize("aware", ["all", "one"])
def test_a_librarys_collective_goes_directly_where_all_ranks_can(comm, monkeypatch, aware):
    can = aware == "all" or comm.Get_rank() == 0
    monkeypatch.setattr(transport, "cuda_aware", lambda: can)
    like, messenger = cupy.empty(0, np.float32), Messenger(comm)
    all_can = aware == "all" or comm.Get_size() == 1
    assert isinstance(messenger.way(like), transport.Aware) == can
    assert isinstance(messenger.common_way(like), transport.Aware) == all_can
