"""Messages arrive whole, in order, and counted."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere

from horovod_sparse.collectives import messenger
from horovod_sparse.collectives.messenger import Messenger

pytestmark = [pytest.mark.mpi, pytest.mark.law]


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("lengths", ["equal", "different", "one", "none"])
def test_allgather_gives_every_rank_every_message(comm, monkeypatch, ring, lengths):
    monkeypatch.setattr(messenger, "RING_BYTES", 0 if ring else 2**31)
    channel = Messenger(comm)
    length = {
        "equal": [24] * channel.ranks,
        "different": [5 * rank for rank in range(channel.ranks)],
        "one": [13 if rank == channel.ranks - 1 else 0 for rank in range(channel.ranks)],
        "none": [0] * channel.ranks,
    }[lengths]
    everyones = channel.allgather(np.full(length[channel.rank], channel.rank, np.uint8), length)
    expected = [[rank] * length[rank] for rank in range(channel.ranks)]
    assert everywhere(comm, [one.tolist() for one in everyones] == expected)
    assert channel.traffic.bytes_received == sum(length) - length[channel.rank]
    assert abs(comm.allreduce(channel.traffic.bytes_sent) - comm.allreduce(channel.traffic.bytes_received)) <= comm.size


@pytest.mark.parametrize("length", [0, 3, 100_000])
def test_messages_between_two_ranks_need_no_length_in_advance_and_keep_their_order(comm, length):
    channel = Messenger(comm)
    right, left = (channel.rank + 1) % channel.ranks, (channel.rank - 1) % channel.ranks
    outgoing = [np.full(length + i, channel.rank + i, np.uint8) for i in range(3)]
    sends = [channel.send(message, right) for message in outgoing]
    for i in range(3):
        message = channel.receive(left, like=outgoing[0]).wait()
        assert np.array_equal(message, np.full(length + i, left + i, np.uint8))
    for send in sends:
        send.wait()
    assert channel.traffic.bytes_sent == channel.traffic.bytes_received == 3 * length + 3


def test_numbers_are_shared_in_rank_order(comm):
    shared = Messenger(comm).share(comm.Get_rank(), 2**40)
    assert everywhere(comm, shared.tolist() == [[rank, 2**40] for rank in range(comm.Get_size())])
