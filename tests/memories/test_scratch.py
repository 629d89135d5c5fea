"""Scratch: one array for all buckets, never lent twice at a time."""

from __future__ import annotations

import numpy as np
from rules import LIKE

from horovod_sparse.memories.scratch import Scratch


def test_the_largest_that_came_back_is_lent_again_where_it_fits_and_never_twice_at_a_time():
    scratch = Scratch()
    small, large = scratch.lend(10, LIKE), scratch.lend(1000, LIKE)
    assert not np.shares_memory(small, large)
    scratch.give_back(large)
    scratch.give_back(small)
    again = scratch.lend(500, LIKE)
    assert (again.size, again.dtype, np.shares_memory(again, large)) == (500, np.float32, True)
    scratch.give_back(again)
    assert scratch.lend(1001, LIKE).size == 1001
    scratch.give_back(again)
    assert scratch.lend(100, np.zeros(0)).dtype == np.float64
