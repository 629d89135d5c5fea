"""balance: equal shares, in the same order, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import everywhere, examples

from horovod_sparse.collectives.balance import balance
from horovod_sparse.mpi.messenger import Messenger
from horovod_sparse.wire import Exact

pytestmark = [pytest.mark.mpi, pytest.mark.law]

WIRE = Exact(np.dtype(np.float32))


@examples(20)
@given(seed=st.integers(0, 2**31), most=st.sampled_from([0, 1, 5, 300]))
def test_shares_are_equal_and_ascend_with_the_ranks(comm, seed, most):
    ranks, rank = comm.Get_size(), comm.Get_rank()
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, most + 1, ranks) * (generator.random(ranks) < 0.5)
    ends = np.cumsum(counts)
    mine = np.arange(ends[rank] - counts[rank], ends[rank], dtype=np.int32)
    (indices, values), shares = balance(Messenger(comm), WIRE, (mine, mine.astype(np.float32)), counts.tolist())
    assert everywhere(comm, sum(shares) == ends[-1] and max(shares) - min(shares) <= 1 and shares[rank] == indices.size)
    assert everywhere(comm, np.concatenate(comm.allgather(indices)).tolist() == list(range(ends[-1])))
    assert everywhere(comm, np.array_equal(values, indices))


def test_only_what_changes_hands_travels(comm):
    messenger = Messenger(comm)
    entries = (np.arange(8, dtype=np.int32) + 8 * messenger.rank, np.ones(8, np.float32))
    balance(messenger, WIRE, entries, [8] * messenger.ranks)
    assert messenger.traffic.bytes_sent == 0
