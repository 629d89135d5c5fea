"""Scratch: one array for all buckets, never lent twice at a time."""

from __future__ import annotations

import numpy as np

from horovod_sparse.scratch import Scratch

LIKE = np.zeros(0, np.float32)


def shares(one, other):
    return np.shares_memory(one, other)


def test_what_came_back_is_lent_again():
    scratch = Scratch()
    first = scratch.take(100, LIKE)
    scratch.give_back(first)
    again = scratch.take(60, LIKE)
    assert shares(first, again)
    assert (again.size, again.dtype) == (60, np.float32)


def test_two_that_are_lent_at_a_time_are_different():
    scratch = Scratch()
    first, second = scratch.take(100, LIKE), scratch.take(100, LIKE)
    assert not shares(first, second)


def test_the_largest_is_kept():
    scratch = Scratch()
    small, large = scratch.take(10, LIKE), scratch.take(1000, LIKE)
    scratch.give_back(large)
    scratch.give_back(small)
    assert shares(scratch.take(500, LIKE), large)


def test_a_larger_one_or_another_dtype_is_made_anew():
    scratch = Scratch()
    first = scratch.take(100, LIKE)
    scratch.give_back(first)
    assert scratch.take(101, LIKE).size == 101
    scratch.give_back(first)
    assert scratch.take(100, np.zeros(0)).dtype == np.float64
