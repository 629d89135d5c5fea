"""balance: equal shares in unchanged order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import everywhere, examples

from horovod_sparse.collectives.balance import balance, saving
from horovod_sparse.vector import SparseVector
from horovod_sparse.wire import Wire

WIRE = Wire.of(None, np.dtype(np.float32))


@pytest.mark.law
@examples(20)
@given(seed=st.integers(0, 2**31), most=st.sampled_from([0, 1, 5, 300]))
def test_shares_are_equal_and_ascend_with_the_ranks(transport, seed, most):
    ranks, rank = transport.size, transport.rank
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, most + 1, ranks) * (generator.random(ranks) < 0.5)
    ends = np.cumsum(counts)
    mine = np.arange(ends[rank] - counts[rank], ends[rank], dtype=np.int32)
    vector = SparseVector(mine, mine.astype(np.float32), max(int(ends[-1]), 1))
    indices, values = balance(transport.channel(), WIRE, vector, counts.tolist()).entries
    shares = transport.allgather_object(indices.size)
    assert everywhere(transport, sum(shares) == ends[-1] and max(shares) - min(shares) <= 1)
    assert everywhere(transport, np.concatenate(transport.allgather_object(indices)).tolist() == list(range(ends[-1])))
    assert everywhere(transport, np.array_equal(values, indices))


@pytest.mark.law
def test_only_entries_that_change_ranks_are_sent(transport):
    transport = transport.channel()
    indices = np.arange(8, dtype=np.int32) + 8 * transport.rank
    vector = SparseVector(indices, np.ones(8, np.float32), 8 * transport.size)
    balance(transport, WIRE, vector, [8] * transport.size)
    assert transport.traffic.bytes_sent == 0


def path_lengths(counts):
    """Return the critical path of an allgather without and with balancing, and the most that a rank sends and receives.

    All in entries, which are moved one by one here.
    """
    ranks, whole = len(counts), sum(counts)
    holders = np.repeat(np.arange(ranks), counts)
    shares = [(rank + 1) * whole // ranks - rank * whole // ranks for rank in range(ranks)]
    owners = np.repeat(np.arange(ranks), shares)
    moved = holders != owners
    given, taken = np.bincount(holders[moved], minlength=ranks), np.bincount(owners[moved], minlength=ranks)
    plain, balanced = (sum(max(np.roll(sizes, step)) for step in range(1, ranks)) for sizes in (counts, shares))
    sent = given + whole - np.roll(shares, -1)
    return plain, max(*given, *taken) + balanced, max(sent), max(taken + whole - shares)


@pytest.mark.parametrize("ranks", range(2, 17))
@settings(max_examples=40)
@given(data=st.data())
def test_the_shorter_gathering_is_chosen_and_bounded_at_every_world_size(ranks, data):
    kinds = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 1000))
    counts = data.draw(st.lists(kinds, min_size=ranks, max_size=ranks))
    if data.draw(st.booleans()):  # all on one rank
        counts = [sum(counts) * (rank == counts[0] % ranks) for rank in range(ranks)]
    plain, balanced, sent, received = path_lengths(counts)
    assert saving(counts) == plain - balanced
    whole, others = sum(counts), ranks - 1
    assert min(plain, balanced) <= 2 * whole * others / ranks + others
    assert sent <= 2 * whole * others / ranks + 2
    assert received <= whole
    assert whole - min(counts) <= min(2 * whole * others / ranks, whole)  # what is sent and received without it
