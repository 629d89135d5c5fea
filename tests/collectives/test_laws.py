"""What every collective must do, at every number of ranks; what is special to one is in its own file."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from collectives.configurations import every_collective, every_rounding_collective, fits
from hypothesis import given
from hypothesis import strategies as st
from laws import (
    Case,
    cases,
    check_exchange,
    check_repeatable,
    dense,
    everywhere,
    examples,
    own_vector,
    rounded_cases,
    same_bits,
)

from horovod_sparse.collectives import make, messenger
from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]


@every_collective
@examples(25)
@given(steps=st.lists(cases, min_size=1, max_size=3))
def test_nothing_is_lost_and_every_rank_holds_the_same_bits(comm, name, options, steps):
    collective = make(name, comm, options)
    for case in steps:
        if fits(name, case):
            check_exchange(comm, collective, case)


@every_collective
@pytest.mark.parametrize("pattern", ["one region", "disjoint"])
def test_a_million_elements(comm, name, options, pattern):
    case = Case(1_000_000, pattern, seed=5, share=0.01)
    if fits(name, case):
        check_exchange(comm, make(name, comm, options), case)


@every_collective
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 11])
def test_works_where_ranks_outnumber_elements(comm, name, options, size):
    collective = make(name, comm, options)
    for pattern in ("everything", "all empty", "everything"):
        check_exchange(comm, collective, Case(size, pattern, seed=1))


@every_collective
@examples(4)
@given(seed=st.integers(0, 1000))
def test_sums_in_one_order_whatever_arrives_first(comm, name, options, seed):
    if name != "shared":
        check_repeatable(comm, lambda: make(name, comm, options), seed)


@every_collective
def test_vectors_without_indices_are_summed_dense(comm, name, options):
    values = np.arange(10, dtype=np.float32) + comm.Get_rank()
    exchange = make(name, comm, options).allreduce(SparseVector.full(values), 10)
    ranks = comm.Get_size()
    assert exchange.total.indices is None
    assert len(exchange.returned) == 0
    assert everywhere(comm, np.array_equal(dense(exchange.total), np.arange(10) * ranks + ranks * (ranks - 1) / 2))


# The others may write the vector out, or do not move indices.
@pytest.mark.parametrize("name", ["topka", "topkdsa", "gtopk", "oktopk", "hierarchical"])
def test_indices_above_2_to_the_24_and_boundary_sums_above_2_to_the_32_stay_exact(comm, name):
    size = 2**31 - 1
    indices = np.array([2**24 + 1 + comm.Get_rank(), size - 1 - comm.Get_rank()], np.int32)
    total = make(name, comm, {}).allreduce(SparseVector(indices, np.ones(2, np.float32), size), 64).total
    ranks = range(comm.Get_size())
    expected = [*(2**24 + 1 + rank for rank in ranks), *(size - 1 - rank for rank in reversed(ranks))]
    assert everywhere(comm, total.indices.tolist() == expected)


@every_collective
def test_what_is_sent_is_received(comm, name, options):
    collective = make(name, comm, options)
    for case in (Case(5000, "everything", seed=1), Case(100_000, "everything", seed=2, dtype="float64")):
        check_exchange(comm, collective, case)
    traffic = collective.traffic
    sent, received = comm.allreduce(traffic.bytes_sent), comm.allreduce(traffic.bytes_received)
    assert abs(sent - received) <= 2 * comm.Get_size()  # shares of a library's collective are rounded
    assert comm.Get_size() == 1 or min(traffic.bytes_sent, traffic.messages_sent) > 0


@every_collective
def test_a_restored_collective_goes_on_with_the_same_bits(comm, name, options):
    first, second = make(name, comm, options), make(name, comm, options)
    steps = [own_vector(Case(3000, "same indices", seed, share=0.05), comm) for seed in range(4)]
    for vector in steps[:2]:
        first.allreduce(vector, 150)
    second.load_state_dict(first.state_dict())
    for vector in steps[2:]:
        one, other = first.allreduce(vector, 150), second.allreduce(vector, 150)
        assert everywhere(comm, np.array_equal(dense(one.total), dense(other.total)))


@every_collective
def test_a_sub_communicator_exchanges_among_its_own_ranks(comm, name, options):
    half = comm.Split(comm.Get_rank() % 2)
    check_exchange(half, make(name, half, options), Case(500, "same indices", seed=comm.Get_rank() % 2))
    half.Free()


@pytest.mark.parametrize("name", ["topka", "topkdsa", "gtopk", "oktopk"])
def test_more_bytes_than_mpi_counts_are_refused_and_not_wrapped(comm, name, monkeypatch):
    if comm.Get_size() == 1:
        return  # nothing is sent
    monkeypatch.setattr(messenger, "MPI_COUNT_MAX", 7)
    vector = SparseVector(np.arange(64, dtype=np.int32), np.ones(64, np.float32), 64)
    collective = make(name, comm.Dup(), {})  # messages under way end with their communicator
    if name in {"gtopk"} and comm.Get_rank() % 2 == 0:
        return  # this rank would wait for a message of one that refuses to send it
    with pytest.raises(RuntimeError, match=r"longer than MPI's limit of 7: lower density or bucket_bytes"):
        collective.allreduce(vector, 64)


def test_collectives_on_one_communicator_do_not_meet(comm):
    pairs = list(itertools.combinations(["topka", "gtopk", "oktopk"], 2))
    for one, other in pairs:
        for name in (one, other, one):
            check_exchange(comm, make(name, comm, {}), Case(300, "random", seed=3))


def test_a_vector_of_another_size_on_the_same_collective_is_no_trap(comm):
    collective = make("oktopk", comm, {})
    for size in (1000, 10, 100_000):
        exchange = check_exchange(comm, collective, Case(size, "everything", seed=2))
        assert same_bits(comm, exchange.total.indices)


# --- values in the format of the wire ---


@every_rounding_collective
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@examples(8)
@given(data=st.data())
def test_what_rounding_takes_away_is_returned(comm, name, options, dtype, data):
    collective = make(name, comm, {**options, "wire": data.draw(st.sampled_from(["float32", "float16", "bfloat16"]))})
    for case in data.draw(st.lists(rounded_cases(dtype), min_size=1, max_size=2)):
        if fits(name, case):
            check_exchange(comm, collective, case)


@every_rounding_collective
def test_rounded_sums_do_not_depend_on_what_arrives_first(comm, name, options):
    if name != "shared":
        check_repeatable(comm, lambda: make(name, comm, {**options, "wire": "bfloat16"}), seed=1)
