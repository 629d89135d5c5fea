"""Scratch: the same arrays for all buckets, never lent twice at a time."""

from __future__ import annotations

import numpy as np
from rules import LIKE

from horovod_sparse.kernels.scratch import Scratch


def test_what_came_back_is_lent_again_where_it_fits_and_never_twice_at_a_time():
    scratch = Scratch()
    small, large = scratch.lend(10, LIKE), scratch.lend(1000, LIKE)
    assert not np.shares_memory(small, large)
    scratch.give_back(large)
    scratch.give_back(small)
    again = scratch.lend(500, LIKE)
    assert (again.size, again.dtype, np.shares_memory(again, large)) == (500, np.float32, True)
    scratch.give_back(again)
    assert scratch.lend(1001, LIKE).size == 1001
    assert scratch.lend(100, np.zeros(0)).dtype == np.float64


def test_no_more_arrays_are_kept_than_were_lent_at_the_same_time():
    scratch = Scratch()
    for size in range(1, 100):
        lent = [scratch.lend(size + more, LIKE) for more in range(2)]
        assert not np.shares_memory(*lent)
        for array in lent:
            scratch.give_back(array)
        assert len(scratch._idle) <= 2
