"""consensus_of: sums over the ranks, with the same bits on all of them."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, same_bits

from horovod_sparse.consensus import consensus_of

pytestmark = [pytest.mark.mpi, pytest.mark.law]


def test_integers_are_summed_exactly(comm):
    total = consensus_of(comm)(np.array([2**40 + comm.Get_rank(), 1], np.int64))
    ranks = comm.Get_size()
    assert everywhere(comm, total.tolist() == [ranks * 2**40 + ranks * (ranks - 1) // 2, ranks])


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_floats_have_the_same_bits_everywhere_and_the_argument_stays(comm, size):
    mine = np.random.default_rng(comm.Get_rank()).standard_normal(size)
    before = mine.copy()
    total = consensus_of(comm)(mine)
    assert same_bits(comm, total)
    assert everywhere(comm, np.allclose(total, comm.allreduce(mine)) and np.array_equal(mine, before))
