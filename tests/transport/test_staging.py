"""Host copies of device arrays: made where MPI cannot take the arrays themselves, and waited for once."""

from __future__ import annotations

import numpy as np
import pytest
from devices import cupy, emulated, on_device, waits
from exchanges import AWARE, HOST, STAGED, WAYS, allocations, through
from mpi4py import MPI

from horovod_sparse.kernels import to_host
from horovod_sparse.transport import staging
from horovod_sparse.transport.mpi import MPITransport
from horovod_sparse.transport.staging import CUDA_AWARE, Staged


def test_nothing_is_decided_for_arrays_of_the_host(monkeypatch):
    monkeypatch.setattr(staging, "cuda_aware", lambda: pytest.fail("asked"))
    assert MPITransport(MPI.COMM_SELF).allreduce(np.arange(3.0)).tolist() == [0, 1, 2]


def test_messages_that_are_sent_together_are_waited_for_once():
    messages = [on_device(np.full(1000, value, np.uint8)) for value in range(5)]
    with waits(1):
        buffers = list(Staged().outgoing(messages))
    for value, buffer in enumerate(buffers):
        assert np.array_equal(buffer.array, np.full(1000, value))
        buffer.close()


def test_a_received_message_is_copied_to_its_target_when_the_buffer_is_closed():
    target = cupy.zeros(1000, np.uint8)
    (buffer,) = Staged().incoming([target])
    buffer.array[:] = 7
    buffer.close()
    assert (to_host(target) == 7).all()


@pytest.mark.mpi
@pytest.mark.parametrize("way", sorted({HOST, STAGED, AWARE} & set(WAYS)))
def test_messages_are_staged_only_if_mpi_is_not_cuda_aware(transport, way):
    with through(way) as put, allocations() as sizes:
        channel = transport.channel()
        channel.allgather(put(np.ones(100, np.uint8)), [100] * channel.size)
        channel.allreduce(put(np.zeros(100, np.float32)))
    if way == STAGED:
        assert (len(sizes) > 0) == (transport.size > 1)
    elif way == HOST or emulated():
        assert sizes == []


@pytest.mark.mpi
@pytest.mark.parametrize("aware", ["all", "one"])
def test_a_librarys_collective_goes_directly_where_all_ranks_can(transport, monkeypatch, aware):
    can = aware == "all" or transport.rank == 0
    monkeypatch.setattr(staging, "cuda_aware", lambda: can)
    like, channel = cupy.empty(0, np.float32), transport.duplicate()
    assert (staging.path_for(like) is CUDA_AWARE) == can
    assert (channel._common_path(like) is CUDA_AWARE) == (aware == "all" or transport.size == 1)
