"""consensus_of: sums over the ranks, with the same bits on all of them, where the numbers are."""

from __future__ import annotations

import numpy as np
import pytest
from exchanges import every_way
from laws import everywhere, same_bits

from horovod_sparse.kernels import to_host
from horovod_sparse.mpi.consensus import consensus_of

pytestmark = [pytest.mark.mpi, pytest.mark.law]


def test_integers_are_summed_exactly(comm):
    total = consensus_of(comm)(np.array([2**40 + comm.Get_rank(), 1], np.int64))
    ranks = comm.Get_size()
    assert everywhere(comm, total.tolist() == [ranks * 2**40 + ranks * (ranks - 1) // 2, ranks])


@every_way
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_floats_have_the_same_bits_everywhere_and_the_argument_stays(comm, put, size):
    mine = np.random.default_rng(comm.Get_rank()).standard_normal(size)
    handed_in = put(mine)
    total = consensus_of(comm)(handed_in)
    assert type(total) is type(handed_in)
    assert same_bits(comm, total)
    assert everywhere(comm, np.allclose(to_host(total), comm.allreduce(mine)))
    assert everywhere(comm, np.array_equal(to_host(handed_in), mine))
