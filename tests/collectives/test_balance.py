"""balance: equal shares, in the same order, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import everywhere, examples

from horovod_sparse.collectives.balance import balance
from horovod_sparse.collectives.messenger import Messenger

pytestmark = [pytest.mark.mpi, pytest.mark.law]


@examples(25)
@given(seed=st.integers(0, 2**31), most=st.sampled_from([0, 1, 5, 300]))
def test_shares_are_equal_and_ascend_with_the_ranks(comm, seed, most):
    ranks, rank = comm.Get_size(), comm.Get_rank()
    counts = np.random.default_rng(seed).integers(0, most + 1, ranks) * (
        np.random.default_rng(seed).random(ranks) < 0.5
    )
    ends = np.cumsum(counts)
    mine = np.arange(ends[rank] - counts[rank], ends[rank], dtype=np.int32)
    (indices, values), shares = balance(Messenger(comm), (mine, mine.astype(np.float32)), counts.tolist())
    assert everywhere(comm, sum(shares) == ends[-1] and max(shares) - min(shares) <= 1 and shares[rank] == indices.size)
    assert everywhere(comm, np.concatenate(comm.allgather(indices)).tolist() == list(range(ends[-1])))
    assert everywhere(comm, np.array_equal(values, indices))


def test_only_what_changes_hands_travels(comm):
    channel = Messenger(comm)
    entries = (np.arange(8, dtype=np.int32) + 8 * channel.rank, np.ones(8, np.float32))
    balance(channel, entries, [8] * channel.ranks)
    assert channel.traffic.bytes_sent == 0
