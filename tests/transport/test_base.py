"""Messages, sums and kept objects: the same laws for every transport."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from exchanges import every_way
from laws import check_counts, everywhere, same_bits, summed

from horovod_sparse.kernels import to_host
from horovod_sparse.transport import base, mpi
from horovod_sparse.transport.mpi import PIECE_BYTES as PIECE
from horovod_sparse.transport.slots import Slots

pytestmark = pytest.mark.law


def numbered(rank, length):
    """Return random bytes, so that pieces differ."""
    return np.random.default_rng([rank, length]).integers(0, 256, length, np.uint8)


def equal(arrays, like, contents):
    pairs = zip(arrays, contents, strict=True)
    return all(type(one) is type(like) and np.array_equal(to_host(one), content) for one, content in pairs)


@every_way
@pytest.mark.parametrize("length", [0, 3, PIECE - 1, PIECE, 3 * PIECE - 2, 5 * PIECE + 77])
def test_messages_between_two_ranks_need_no_length_in_advance_and_keep_their_order(transport, put, length):
    channel = transport.channel()
    right, left = (channel.rank + 1) % channel.size, (channel.rank - 1) % channel.size
    for _ in range(2):  # blocks of pinned memory are used again
        outgoing = [put(numbered(channel.rank + i, length + i)) for i in range(3)]
        sends = channel.send_all(outgoing[:2], [right] * 2, outgoing[0])
        sends.append(channel.send(outgoing[2], right))
        arriving = [channel.receive(left, outgoing[0]) for _ in range(3)]
        arrived = [one.wait() for one in arriving]
        assert everywhere(transport, equal(arrived, outgoing[0], [numbered(left + i, length + i) for i in range(3)]))
        for send in sends:
            send.wait()
    assert channel.traffic.bytes_sent == channel.traffic.bytes_received == 2 * (3 * length + 3)
    assert channel.traffic.messages_sent == channel.traffic.messages_received == 6


@pytest.mark.parametrize("lengths", [(PIECE, 1, 2 * PIECE), (4 * PIECE - 1, 4 * PIECE + 1, 0), (1_000_001, PIECE, 7)])
def test_pieces_of_concurrent_messages_are_reassembled(transport, lengths):
    """All messages are in flight together, and are waited for in reverse order."""
    channel = transport.channel()
    others = [rank for rank in range(channel.size) for _ in lengths]
    messages = [numbered(channel.rank, length) for _ in range(channel.size) for length in lengths]
    sends = channel.send_all(messages, others, messages[0])
    arriving = [channel.receive(rank, messages[0]) for rank in others]
    expected = [numbered(rank, length) for rank in range(channel.size) for length in lengths]
    arrived = [one.wait() for one in reversed(arriving)][::-1]
    for send in sends:
        send.wait()
    assert everywhere(transport, all(map(np.array_equal, arrived, expected)))


@every_way
@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("lengths", ["equal", "different", "one", "none", "long"])
def test_allgather_gives_every_rank_every_message(transport, put, monkeypatch, ring, lengths):
    monkeypatch.setattr(base, "RING_BYTES", 0 if ring else 2**31)
    monkeypatch.setattr(mpi, "RING_BYTES", 0 if ring else 2**31)
    channel = transport.channel()
    length = {
        "equal": [2400] * channel.size,
        "different": [505 * rank for rank in range(channel.size)],
        "one": [13 if rank == channel.size - 1 else 0 for rank in range(channel.size)],
        "none": [0] * channel.size,
        "long": [5 * PIECE - 1, *(rank * PIECE + rank % 2 for rank in range(1, channel.size))],
    }[lengths]
    for value in range(2):
        mine = put(numbered(channel.rank + value, length[channel.rank]))
        everyones = channel.allgather(mine, length)
        assert everywhere(transport, equal(everyones, mine, [numbered(r + value, one) for r, one in enumerate(length)]))
    assert channel.traffic.bytes_received == 2 * (sum(length) - length[channel.rank])
    check_counts(transport, channel.traffic)


@every_way
def test_slots_deliver_messages_and_numbers_of_any_lengths(transport, put):
    """Lengths that stay, that change by little and by much, that differ between ranks, and none at all."""
    channel, slots = transport.channel(), Slots()
    for call, base_length in enumerate([1000, 1000, 1003, 990, 5000, 0, 7, 2_000_003, 1000]):
        for spread in (0, call % 3, 40 * call):
            lengths = [base_length + spread * rank for rank in range(channel.size)]
            mine = put(numbered(channel.rank, lengths[channel.rank]))
            messages, numbers = channel.allgather_slots(mine, slots, 10 * call + channel.rank)
            expected = [numbered(rank, length) for rank, length in enumerate(lengths)]
            assert everywhere(transport, all(map(np.array_equal, map(to_host, messages), expected)))
            assert everywhere(transport, numbers == [10 * call + rank for rank in range(channel.size)])
            assert everywhere(transport, all(to_host(one).ctypes.data % 8 == 0 for one in messages if one.size))
    assert same_bits(transport, np.array([slots.size]))
    check_counts(transport, channel.traffic)


@pytest.mark.parametrize(("change", "rounds"), [(0, 1), (3, 1), (-3, 1), (500, 2)])
def test_messages_that_fit_into_the_slots_take_one_round(transport, monkeypatch, change, rounds):
    channel, slots, calls = transport.channel(), Slots(), []
    channel.allgather_slots(np.zeros(2000 + channel.rank % 2, np.uint8), slots)
    gather = channel._gather
    monkeypatch.setattr(channel, "_gather", lambda *given: calls.append(1) or gather(*given))
    channel.allgather_slots(np.zeros(2000 + channel.rank % 2 + change, np.uint8), slots)
    assert everywhere(transport, len(calls) == (rounds if channel.size > 1 else 0))


@every_way
@pytest.mark.parametrize("size", [0, 1, 5, 64, 65, 1000, 4097])
def test_sums_have_the_same_bits_on_every_rank_as_they_are_taken_in_rank_order(transport, put, size):
    generator, channel = np.random.default_rng(transport.rank), transport.channel()
    for mine in (generator.standard_normal(size), generator.integers(-99, 99, size).astype(np.float32) / 8):
        handed_in = put(mine)
        total = channel.allreduce(handed_in)
        assert same_bits(transport, total)
        assert type(total) is type(handed_in)
        assert everywhere(transport, to_host(total).tobytes() == summed(transport, mine).tobytes())
        assert everywhere(transport, np.array_equal(to_host(handed_in), mine))
    check_counts(transport, channel.traffic)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_integers_are_summed_exactly(transport, dtype):
    total = transport.allreduce(np.array([transport.rank, 1, 0], dtype))
    assert total.dtype == dtype
    assert everywhere(transport, total.tolist() == [sum(range(transport.size)), transport.size, 0])


def test_objects_are_gathered_and_broadcast(transport):
    everyones = [{"rank": rank, "text": "x" * 50_000 * rank} for rank in range(transport.size)]
    mine = everyones[transport.rank]
    assert transport.allgather_object(mine) == everyones
    assert transport.broadcast_object(mine) == everyones[0]
    assert (transport.channel().traffic.bytes_sent, transport.channel().traffic.bytes_received) == (0, 0)


def test_longer_messages_than_are_allowed_are_refused_on_every_rank(transport, monkeypatch):
    monkeypatch.setattr(base, "MAX_MESSAGE_BYTES", 7)
    channel, long = transport.channel(), np.zeros(8, np.uint8)
    calls = (
        lambda: channel.send(long, channel.rank),
        lambda: channel.allgather(long if channel.rank == 0 else long[:1], [8] + [1] * (channel.size - 1)),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=rf"rank {channel.rank} of .*the limit of 7: lower density or bucket"):
            call()
    transport.barrier()


def test_integers_are_gathered_in_rank_order_and_channels_count_their_own_traffic(transport):
    one, other = transport.channel(), transport.channel()
    gathered = one.allgather_integers(transport.rank, 2**40)
    assert everywhere(transport, gathered.tolist() == [[rank, 2**40] for rank in range(transport.size)])
    assert one.traffic.bytes_sent == 16 * (transport.size - 1)
    assert other.traffic.bytes_sent == 0


def check_that_waits_take_any_order(transport, seed):
    """Start short sums; wait for some before and for some after messages that ranks wait for at once."""
    channel, rank, ranks = transport.channel(), transport.rank, transport.size
    begun, expected = [], []
    for number in range(3):
        begun.append(channel.begin_allreduce(np.arange(4) + number).wait)
        begun.append(channel.begin_allreduce(np.full(3, rank + 0.5, np.float32)).wait)
        expected.append([ranks * (i + number) for i in range(4)])
        expected.append([sum(other + 0.5 for other in range(ranks))] * 3)
    order = np.random.default_rng([seed, rank]).permutation(len(begun)).tolist()
    before = (seed + rank) % ranks * len(begun) // max(1, ranks - 1)  # from none to all
    results = {number: begun[number]().tolist() for number in order[:before]}
    sent = channel.send(numbered(rank, 7), (rank + 1) % ranks)
    total, integers = channel.allreduce(np.ones(2)), channel.allgather_integers(rank)
    message = channel.receive((rank - 1) % ranks, numbered(rank, 0)).wait()
    sent.wait()
    results |= {number: begun[number]().tolist() for number in order[before:]}
    assert everywhere(transport, [results[number] for number in range(len(begun))] == expected)
    assert everywhere(transport, integers[:, 0].tolist() == list(range(ranks)) and total.tolist() == [ranks] * 2)
    assert everywhere(transport, (message == numbered((rank - 1) % ranks, 7)).all())


@pytest.mark.parametrize("seed", range(5))
def test_gatherings_and_short_sums_in_flight_are_waited_for_in_any_order(transport, seed):
    check_that_waits_take_any_order(transport, seed)


@pytest.mark.mpi
@pytest.mark.parametrize("seed", range(5))
def test_on_many_ranks_too_they_are_waited_for_in_any_order(transport, seed, many):
    check_that_waits_take_any_order(transport, seed)


def test_abandoned_gatherings_keep_their_arrays_alive(transport):
    wait = base.Request(transport._rows(np.arange(50), waits=False)).wait
    cells = wait.__self__._finish.__closure__
    rows = next(cell.cell_contents for cell in cells if isinstance(cell.cell_contents, np.ndarray))
    kept = weakref.ref(rows)
    del wait, rows, cells
    gc.collect()
    assert everywhere(transport, kept() is not None)
    last = base.Request(transport._rows(np.arange(5), waits=False)).wait
    kept = weakref.ref(last())
    del last
    gc.collect()
    assert everywhere(transport, kept() is None)


def test_messages_of_a_duplicate_are_not_met(transport):
    duplicate = transport.duplicate()
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    sends = [one.send(np.full(3, value, np.uint8), right) for one, value in ((transport, 1), (duplicate, 2))]
    arrived = [one.receive(left, np.empty(0, np.uint8)).wait().tolist() for one in (duplicate, transport)]
    assert everywhere(transport, arrived == [[2] * 3, [1] * 3])
    for sending in sends:
        sending.wait()


def test_an_object_is_made_once_for_each_name_and_connection(transport):
    fresh, made = transport.duplicate(), []
    for channel, name in ((fresh, "a"), (fresh.channel(), "a"), (fresh, "b"), (fresh.channel(), "a")):
        assert channel.keep(name, lambda name=name: made.append(name) or name) == name
    assert made == ["a", "b"]
    assert fresh.duplicate().keep("a", lambda: "of the duplicate") == "of the duplicate"
    assert fresh.keep("outer", lambda: ["outer", fresh.keep("inner", lambda: "inner")]) == ["outer", "inner"]
    with pytest.raises(ZeroDivisionError):
        fresh.keep("impossible", lambda: 1 // 0)
    assert fresh.keep("impossible", lambda: "made") == "made"


def test_posted_objects_arrive_by_kind_and_in_order(transport):
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    for rank in others:
        for kind in (7, 8):
            for number in range(2):
                transport.post((transport.rank, kind, number), rank, kind)
    transport.barrier()
    for kind in (8, 7):
        arrived = []
        while len(arrived) < 2 * len(others):
            arrived += transport.poll(kind)
        assert sorted(arrived) == [(rank, (rank, kind, number)) for rank in others for number in range(2)]
        assert [number for rank in others for source, (_, _, number) in arrived if source == rank] == [0, 1] * len(
            others
        )
        assert transport.poll(kind) == []
    transport.barrier()


def test_measurements_are_inherited_if_all_ranks_have_them(transport):
    """The oldest ones count; ranks never use different ones."""
    first, second, third, fourth = (transport.duplicate() for _ in range(4))
    earlier = [first.inherit([])]
    first.channel().measured("link", lambda: 1)
    if transport.rank == 0:  # still measuring elsewhere
        first.measured("coding", lambda: 2)
    earlier.append(second.inherit(earlier))
    alone = transport.size == 1
    assert everywhere(transport, earlier[1] == ({"link": 1, "coding": 2} if alone else {}))
    second.measured("link", lambda: 3)
    earlier.append(third.inherit(earlier))
    assert everywhere(transport, third.channel().measured("link", lambda: 4) == (1 if alone else 3))
    first.measured("coding", lambda: 2)
    assert everywhere(transport, fourth.inherit(earlier) == {"link": 1, "coding": 2})
    assert everywhere(transport, first.measured("link", lambda: 5) == 1)
