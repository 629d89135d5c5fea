"""Ranks that are threads: the bits of MPI, and failures that block no rank."""

from __future__ import annotations

import time

import numpy as np
import pytest
from laws import Case, allreduce, digest_of, everywhere, make, own_vector

from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.transport.in_process import RankFailedError, run_ranks


def exchange(transport, name):
    """Digests of some exchanges, of every pattern and several formats, and the bytes that they took."""
    digests = []
    formats = [None] if name == "dense" else [None, "bfloat16", "log8"]
    for wire in formats:
        settings = {} if name == "dense" else {"wire": wire, "indices": "coded"}
        collective = make(transport, name, **settings)
        for seed, pattern in enumerate(["same indices"] if name == "shared" else ["random", "one region", "all empty"]):
            vector = own_vector(Case(4000, pattern, seed=seed, share=0.1), transport)
            found = allreduce(collective, vector, 400)
            digests.append((digest_of(found.total, found.returned), collective.traffic.bytes_sent))
    values = np.random.default_rng(transport.rank).standard_normal(100_000).astype(np.float32)
    return [*digests, transport.allreduce(values).tobytes(), transport.allreduce(values[:9]).tobytes()]


@pytest.mark.mpi
@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "auto"])
def test_collectives_give_the_bits_of_mpi(transport, name):
    """Auto decides by measured times."""
    over_mpi = exchange(transport, name)
    in_process = run_ranks(transport.size, lambda threads: exchange(threads, name))
    assert everywhere(transport, over_mpi == in_process[transport.rank])


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("wait", ["allreduce", "receive"])
@pytest.mark.parametrize(("error", "raised"), [(None, RankFailedError), (ValueError("of rank 1"), ValueError)])
def test_an_error_of_one_rank_ends_the_waits_of_the_others(size, wait, error, raised):
    def program(transport):
        if transport.rank != 1:
            return (
                transport.receive(1, np.empty(0, np.uint8)) if wait == "receive" else transport.allreduce(np.ones(1000))
            )
        if error:
            raise error
        return None

    begin = time.monotonic()
    with pytest.raises(raised, match=str(error or "thread 1 has ended")):
        run_ranks(size, program)
    assert time.monotonic() - begin < 5


def test_different_operations_are_an_error():
    def program(transport):
        return transport.barrier() if transport.rank else transport.broadcast_object("x")

    with pytest.raises(RuntimeError, match=r"is in a b.*, but rank . is in a b"):
        run_ranks(2, program)


def test_messages_that_were_sent_are_not_changed_by_the_sender():
    def program(transport):
        values = np.full(4, transport.rank, np.uint8)
        transport.send(values, 1 - transport.rank)
        values[:] = 9
        return transport.receive(1 - transport.rank, values).wait().tolist()

    assert run_ranks(2, program) == [[1] * 4, [0] * 4]


def test_ranks_that_end_early_do_not_disturb_the_others():
    """Rank 0 ends at once, with an operation in flight; rank 2 is late."""

    def program(transport):
        message = np.full(3, transport.rank, np.uint8)
        if transport.rank == 2:
            time.sleep(0.3)
        summed = transport.begin_allreduce(np.array([1.0])).wait
        if transport.rank != 1:
            transport.send(message, 1)
        if transport.rank == 0:
            return []
        total, sources = summed().tolist(), (2, 0) if transport.rank == 1 else ()
        return total + [int(transport.receive(source, message).wait()[0]) for source in sources]

    assert run_ranks(3, program) == [[], [3.0, 2, 0], [3.0]]


def test_gtopk_survives_ranks_that_end_early_among_64():
    """Ranks end while others still wait for slower ones."""

    def program(transport):
        collective = make(transport, "gtopk")
        vector = own_vector(Case(300, "random", seed=1, share=0.1), transport)
        for step in range(3):
            time.sleep(0.05 * (transport.rank % 7 == step))
            total = allreduce(collective, vector, 30).total
        return digest_of(total)

    assert len(set(run_ranks(64, program))) == 1


@pytest.mark.parametrize("rank", [0, 63])
def test_a_rank_of_many_that_ends_before_its_exchange_is_named(rank):
    def program(transport):
        collective = make(transport, "gtopk")
        vector = own_vector(Case(300, "random", seed=1, share=0.1), transport)
        allreduce(collective, vector, 30)
        if transport.rank != rank:
            allreduce(collective, vector, 30)

    begin = time.monotonic()
    with pytest.raises(RankFailedError, match=f"thread {rank} has ended"):
        run_ranks(64, program)
    assert time.monotonic() - begin < 20
