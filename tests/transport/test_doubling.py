"""Gatherings in log2 P rounds, over every transport."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere

from horovod_sparse.transport.doubling import gather_by_doubling
from horovod_sparse.transport.in_process import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64])
@pytest.mark.parametrize("lengths", ["equal", "different", "empty"])
def test_every_rank_gets_every_part_in_log2_messages(size, lengths):
    length = {"equal": lambda rank: 3, "different": lambda rank: rank % 4, "empty": lambda rank: 0}[lengths]

    def program(transport):
        parts = [np.full(length(rank), -1, np.int32) for rank in range(size)]
        parts[transport.rank][:] = transport.rank

        def trade(sent, to, received, origin):
            transport.send(sent, to)
            received[:] = transport.receive(origin, sent).wait()

        gather_by_doubling(parts, transport.rank, trade)
        assert all((part == rank).all() for rank, part in enumerate(parts))
        return transport.traffic.messages_sent, transport.traffic.bytes_sent

    for rank, (messages, nbytes) in enumerate(run_ranks(size, program)):
        assert messages == (size - 1).bit_length()
        assert nbytes == sum(4 * length(other) for other in range(size) if other != rank) or lengths == "different"


@pytest.mark.mpi
def test_objects_arrays_and_sums_are_those_of_few_ranks(transport, many):
    rank, ranks = transport.rank, transport.size
    assert transport.allgather_object("x" * rank) == ["x" * other for other in range(ranks)]
    lengths = [4 * other for other in range(ranks)]
    parts = transport.allgather(np.full(4 * rank, rank, np.uint8), lengths)
    assert everywhere(transport, all(part.tolist() == [other] * 4 * other for other, part in enumerate(parts)))
    assert everywhere(transport, transport.allreduce(np.arange(3)).tolist() == [0, ranks, 2 * ranks])
    values = np.full(3, 1 / (rank + 3), np.float32)
    total = np.float32(0)
    for other in range(ranks):
        total += np.float32(1 / (other + 3))
    assert everywhere(transport, (transport.allreduce(values) == total).all())
    assert [transport.broadcast_object(number + rank) for number in range(3)] == [0, 1, 2]
    assert everywhere(transport, transport.anywhere(rank == ranks - 1) and not transport.anywhere(False))
