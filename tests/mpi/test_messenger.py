"""Messages and sums arrive whole, in order, and counted, on the host and by every way from device to device."""

from __future__ import annotations

import numpy as np
import pytest
from exchanges import every_way
from laws import everywhere, same_bits

from horovod_sparse.kernels import to_host
from horovod_sparse.mpi import messenger, transport
from horovod_sparse.mpi.messenger import Messenger

pytestmark = [pytest.mark.mpi, pytest.mark.law]


def message(put, length, value):
    return put(np.full(length, value, np.uint8))


def equal(array, like, length, value):
    return type(array) is type(like) and np.array_equal(to_host(array), np.full(length, value, np.uint8))


def check_counts(comm, traffic):
    """What leaves arrives; shares of a library's collective are rounded."""
    assert abs(comm.allreduce(traffic.bytes_sent) - comm.allreduce(traffic.bytes_received)) <= 3 * comm.Get_size()


PIECE = messenger.PIECE_BYTES


@every_way
@pytest.mark.parametrize("length", [0, 3, PIECE - 1, PIECE, 3 * PIECE - 2, 5 * PIECE + 77])
def test_messages_between_two_ranks_need_no_length_in_advance_and_keep_their_order(comm, put, length):
    channel = Messenger(comm)
    right, left = (channel.rank + 1) % channel.ranks, (channel.rank - 1) % channel.ranks
    for _ in range(2):  # blocks of pinned memory are used again
        outgoing = [message(put, length + i, channel.rank + i) for i in range(3)]
        sends = channel.send_all(outgoing[:2], [right] * 2, outgoing[0])
        sends.append(channel.send(outgoing[2], right))
        arriving = [channel.receive(left, outgoing[0]) for _ in range(3)]
        arrived = [one.wait() for one in arriving]
        assert everywhere(comm, all(equal(one, outgoing[0], length + i, left + i) for i, one in enumerate(arrived)))
        for send in sends:
            send.wait()
    assert channel.traffic.bytes_sent == channel.traffic.bytes_received == 2 * (3 * length + 3)
    assert channel.traffic.messages_sent == channel.traffic.messages_received == 6


def numbered(rank, length):
    """Bytes that tell pieces apart."""
    return np.random.default_rng([rank, length]).integers(0, 256, length, np.uint8)


@pytest.mark.parametrize("lengths", [(PIECE, 1, 2 * PIECE), (4 * PIECE - 1, 4 * PIECE + 1, 0), (1_000_001, PIECE, 7)])
def test_pieces_of_messages_of_all_ranks_to_all_find_their_places(comm, lengths):
    """While all of them are under way, and whatever is waited for first."""
    channel = Messenger(comm)
    others = [rank for rank in range(channel.ranks) for _ in lengths]
    messages = [numbered(channel.rank, length) for _ in range(channel.ranks) for length in lengths]
    sends = channel.send_all(messages, others, messages[0])
    arriving = [channel.receive(rank, messages[0]) for rank in others]
    expected = [numbered(rank, length) for rank in range(channel.ranks) for length in lengths]
    arrived = [one.wait() for one in reversed(arriving)][::-1]
    for send in sends:
        send.wait()
    assert everywhere(comm, all(map(np.array_equal, arrived, expected)))


@every_way
def test_the_ring_passes_long_messages_on_in_pieces(comm, put):
    channel = Messenger(comm)
    lengths = [rank * PIECE + rank % 2 for rank in range(channel.ranks)]
    lengths[0] = 5 * PIECE - 1
    mine = put(numbered(channel.rank, lengths[channel.rank]))
    everyones = channel.allgather(mine, lengths)
    assert everywhere(comm, all(type(one) is type(mine) for one in everyones))
    expected = [numbered(rank, length) for rank, length in enumerate(lengths)]
    assert everywhere(
        comm, all(np.array_equal(to_host(one), other) for one, other in zip(everyones, expected, strict=True))
    )
    check_counts(comm, channel.traffic)


@every_way
@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("lengths", ["equal", "different", "one", "none"])
def test_allgather_gives_every_rank_every_message(comm, put, monkeypatch, ring, lengths):
    monkeypatch.setattr(messenger, "RING_BYTES", 0 if ring else 2**31)
    channel = Messenger(comm)
    length = {
        "equal": [2400] * channel.ranks,
        "different": [505 * rank for rank in range(channel.ranks)],
        "one": [13 if rank == channel.ranks - 1 else 0 for rank in range(channel.ranks)],
        "none": [0] * channel.ranks,
    }[lengths]
    for value in range(2):
        mine = message(put, length[channel.rank], channel.rank + value)
        everyones = channel.allgather(mine, length)
        assert everywhere(comm, all(equal(one, mine, length[r], r + value) for r, one in enumerate(everyones)))
    assert channel.traffic.bytes_received == 2 * (sum(length) - length[channel.rank])
    check_counts(comm, channel.traffic)


@every_way
@pytest.mark.parametrize("length", [0, 5, 10_000])
def test_broadcast_gives_every_rank_the_first_ones_message(comm, put, length):
    channel = Messenger(comm)
    for value in range(2):
        mine = message(put, length if channel.rank == 0 else 0, value)
        assert everywhere(comm, equal(channel.broadcast(mine, length), mine, length, value))
    check_counts(comm, channel.traffic)


@every_way
@pytest.mark.parametrize("size", [0, 1, 1000, 4097])
def test_sums_have_the_same_bits_on_every_rank(comm, put, monkeypatch, size):
    monkeypatch.setattr(transport, "PIECE_BYTES", 4096)
    generator, channel = np.random.default_rng(comm.Get_rank()), Messenger(comm)
    for mine in (generator.standard_normal(size), generator.integers(-99, 99, size).astype(np.float32) / 8):
        handed_in = put(mine)
        total = channel.sum(handed_in)
        assert same_bits(comm, total)
        assert type(total) is type(handed_in)
        assert everywhere(comm, np.allclose(to_host(total), comm.allreduce(mine), atol=1e-12))
        assert everywhere(comm, np.array_equal(to_host(handed_in), mine))
    check_counts(comm, channel.traffic)


def test_numbers_are_shared_in_rank_order(comm):
    shared = Messenger(comm).share(comm.Get_rank(), 2**40)
    assert everywhere(comm, shared.tolist() == [[rank, 2**40] for rank in range(comm.Get_size())])


def test_more_bytes_than_mpi_counts_are_refused_on_every_rank_and_not_wrapped(comm, monkeypatch):
    monkeypatch.setattr(messenger, "MPI_COUNT_MAX", 7)
    channel, long = Messenger(comm), np.zeros(8, np.uint8)
    calls = (
        lambda: channel.send(long, channel.rank),
        lambda: channel.allgather(long if channel.rank == 0 else long[:1], [8] + [1] * (channel.ranks - 1)),
        lambda: channel.broadcast(long, 8),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=rf"rank {channel.rank} of .*MPI's limit of 7: lower density or bucket"):
            call()
