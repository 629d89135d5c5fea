"""split_reduce: every owner sums its region, however the steps are grouped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import Case, cases, dense, everywhere, examples, own_vector, vectors

from horovod_sparse.collectives.messenger import Messenger
from horovod_sparse.collectives.split import split_reduce

pytestmark = [pytest.mark.mpi, pytest.mark.law]


@examples(25)
@given(case=cases, throttle=st.sampled_from([1, 2, 4, 99]), seed=st.integers(0, 2**31))
def test_an_owner_has_the_sums_of_its_region(comm, case, throttle, seed):
    everyones = vectors(case, comm.Get_size())
    inner = np.sort(np.random.default_rng(seed).integers(0, case.size + 1, comm.Get_size() - 1))
    boundaries = np.array([0, *inner, case.size], np.int64)
    indices, values = split_reduce(Messenger(comm), everyones[comm.Get_rank()], boundaries, throttle)
    begin, end = boundaries[comm.Get_rank() : comm.Get_rank() + 2]
    sums = np.zeros(case.size, case.dtype)
    sums[indices] = values
    assert everywhere(comm, np.array_equal(sums[begin:end], sum(map(dense, everyones))[begin:end]))
    assert everywhere(comm, bool(((begin <= indices) & (indices < end)).all()))


def test_a_rank_sends_each_other_rank_one_message(comm):
    channel = Messenger(comm)
    mine = own_vector(Case(1000, "everything", seed=1), comm)
    boundaries = np.linspace(0, 1000, channel.ranks + 1).astype(np.int64)
    split_reduce(channel, mine, boundaries, throttle=2)
    others = channel.ranks - 1
    assert (channel.traffic.messages_sent, channel.traffic.messages_received) == (others, others)
    assert channel.traffic.bytes_sent == 8 * (1000 - np.diff(boundaries)[channel.rank])
