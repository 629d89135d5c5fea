"""Farewells reach the ranks that suffice to end the job, and no others."""

from __future__ import annotations

import itertools

import pytest

from horovod_sparse.control.link import Link
from horovod_sparse.transport.in_process import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64])
def test_a_farewell_takes_two_messages_per_doubling_of_the_ranks(size):
    def program(transport):
        link = Link(transport)
        link.say_farewell("bye")
        transport.barrier()
        return link.farewells()

    heard = run_ranks(size, program)
    for rank, farewells in enumerate(heard):
        assert len(farewells) == len({other for other, _ in farewells}) <= 2 * (size - 1).bit_length()
        assert {other for other, _ in farewells} >= {(rank + 1) % size, (rank - 1) % size} - {rank}
        assert size > 5 or len(farewells) == size - 1, "few ranks hear of each other"


@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_remaining_rank_receives_a_farewell(size):
    for number in range(1, size):
        for left in itertools.combinations(range(size), number):

            def program(transport, left=left):
                link = Link(transport)
                if transport.rank in left:
                    link.say_farewell("bye")
                transport.barrier()
                return transport.rank not in left and bool(link.farewells())

            assert any(run_ranks(size, program))
