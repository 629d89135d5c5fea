"""delivered: what did not come back whole."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.memories.delivered import delivered
from horovod_sparse.vector import SparseVector

ACCUMULATOR = Accumulator(np.zeros(10, np.float32), [(1, np.ones(3, np.float32)), (6, np.ones(2, np.float32))])


def vector(entries):
    return SparseVector(np.array(list(entries), np.int32), np.array(list(entries.values()), np.float32), 10)


@pytest.mark.parametrize(
    ("sent", "returned", "expected"),
    [
        ({1: 5, 3: -2}, {}, [1, 3]),
        ({1: 5, 3: -2}, {3: -2}, [1]),
        ({1: 5, 3: -2}, {1: 5, 3: -2}, []),
        ({1: 5, 3: -2}, {3: -0.125}, [1, 3]),  # what rounding took away
        ({1: 5, 3: -2}, {2: 7, 9: 1}, [1, 3]),  # other ranks' entries
        ({1: 5, 3: 0}, {}, [1]),  # a held position of a shared vector
        ({}, {2: 7}, []),
    ],
)
def test_entries_that_did_not_come_back_whole(sent, returned, expected):
    assert delivered(ACCUMULATOR, vector(sent), vector(returned)).tolist() == expected


def test_a_dense_step_delivers_all_that_takes_part_unless_it_failed():
    whole = SparseVector.full(np.ones(10, np.float32))
    assert delivered(ACCUMULATOR, whole, whole.nothing()).tolist() == [1, 2, 3, 6, 7]
    assert delivered(ACCUMULATOR, whole, whole).tolist() == []
