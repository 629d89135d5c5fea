"""Scratch memory is reused, and never shared by two arrays."""

from __future__ import annotations

import numpy as np
from rules import LIKE

from horovod_sparse.kernels.scratch import Scratch


def test_memory_that_fits_is_reused_once_no_view_refers_to_it():
    scratch = Scratch()
    small, large = scratch.empty(20_000, LIKE), scratch.empty(100_000, LIKE)
    assert not np.shares_memory(small, large)
    place, view = large.ctypes.data, large[10:20].view(np.uint8)
    del large
    assert scratch.empty(50_000, LIKE).ctypes.data != place  # the view refers to it
    del view
    again = scratch.empty(40_000, LIKE, np.float64)
    assert (again.size, again.dtype, again.ctypes.data) == (40_000, np.float64, place)
    assert again.flags.writeable
    assert not np.shares_memory(again, scratch.empty(40_000, LIKE, np.float64))


def test_no_more_blocks_are_kept_than_were_in_use_at_the_same_time():
    scratch = Scratch()
    for size in range(20_000, 120_000, 1000):
        arrays = [scratch.empty(size + more, LIKE) for more in range(2)]
        assert not np.shares_memory(*arrays)
        del arrays
        assert len(scratch._idle) <= 2
