"""split_reduce: every owner sums its region, for every grouping of the messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import Case, cases, dense, everywhere, examples, own_vector, vector_of

from horovod_sparse.collectives.split import split_reduce
from horovod_sparse.wire import Wire

pytestmark = pytest.mark.law


@examples(20)
@given(case=cases(most=5000), throttle=st.sampled_from([1, 2, 4, 99]), seed=st.integers(0, 2**31))
def test_an_owner_has_the_sums_of_its_region(transport, case, throttle, seed):
    rank, ranks = transport.rank, transport.size
    everyones = [vector_of(case, other, ranks) for other in range(ranks)]
    inner = np.sort(np.random.default_rng(seed).integers(0, case.size + 1, ranks - 1))
    boundaries = np.array([0, *inner, case.size], np.int64)
    wire = Wire.of(None, np.dtype(case.dtype))
    indices, values = split_reduce(transport.channel(), wire, everyones[rank], boundaries, throttle)
    begin, end = boundaries[rank : rank + 2]
    sums = np.zeros(case.size, case.dtype)
    sums[indices] = values
    assert everywhere(transport, np.array_equal(sums[begin:end], sum(map(dense, everyones))[begin:end]))
    assert everywhere(transport, bool(((begin <= indices) & (indices < end)).all()))


def test_a_rank_sends_each_other_rank_one_message(transport):
    transport, mine = transport.channel(), own_vector(Case(1000, "everything"), transport)
    boundaries = np.linspace(0, 1000, transport.size + 1).astype(np.int64)
    split_reduce(transport, Wire.of(None, mine.values.dtype), mine, boundaries, throttle=2)
    traffic, others = transport.traffic, transport.size - 1
    assert (traffic.messages_sent, traffic.messages_received) == (others, others)
    sent = 8 * (1000 - np.diff(boundaries)[transport.rank])
    assert sent + 24 * others <= traffic.bytes_sent <= sent + 32 * others  # headers, and values up to a multiple of 8
