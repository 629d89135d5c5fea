"""Dense: one MPI Allreduce of the whole bucket."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from laws import cases, check_exchange, check_repeatable, everywhere

from horovod_sparse.collectives import Dense
from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]


@settings(max_examples=60)
@given(case=cases)
def test_nothing_is_lost_and_every_rank_holds_the_same_bits(comm, case):
    check_exchange(comm, Dense(comm), case)


def test_repeated_runs_give_the_same_bits(comm):
    check_repeatable(comm, Dense(comm), seed=5)


def test_sends_as_many_bytes_as_a_ring(comm):
    collective = Dense(comm)
    collective.allreduce(SparseVector.full(np.ones(1200, np.float32)))
    ranks = comm.Get_size()
    assert everywhere(comm, collective.traffic.bytes == round(2 * 4800 * (ranks - 1) / ranks))
