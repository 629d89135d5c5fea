"""Ranks of a node share its cores out among them."""

from __future__ import annotations

import os
import sys

import pytest
from laws import everywhere

from horovod_sparse.transport import cores
from horovod_sparse.transport.cores import own_cores, share

pytestmark = pytest.mark.law


@pytest.mark.parametrize(
    ("everyones", "expected"),
    [
        ([[0, 1, 2, 3]], 4),
        ([[0, 1], [2, 3]], 2),
        ([[0, 1, 2, 3]] * 2, 2),
        ([[0, 1, 2, 3]] * 3, 4 / 3),
        ([[0, 1]] * 8, 0.25),
        ([[0, 1, 2, 3], [3, 4], [2, 3]], 2 + 1 / 2 + 1 / 3),
        ([list(range(49))] * 49, 1),
    ],
)
def test_a_core_that_several_ranks_may_run_on_is_divided(everyones, expected):
    assert share(everyones[0], everyones) == pytest.approx(expected)


def test_every_rank_has_at_least_one_and_together_they_do_not_exceed_the_node(transport, monkeypatch):
    monkeypatch.setattr(cores, "_affinity", lambda: list(range(6)))
    monkeypatch.setattr(cores, "_limit", lambda environment: sys.maxsize)
    own = transport.duplicate()
    assert everywhere(transport, own_cores(own) == max(1, 6 // transport.size))
    monkeypatch.setattr(cores, "_affinity", list)
    assert everywhere(transport, own_cores(own) == max(1, 6 // transport.size))  # it is kept


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("4,2", 4), ("", sys.maxsize), ("many", sys.maxsize)])
def test_the_users_number_of_threads_is_the_most(monkeypatch, given, expected):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cores._limit({"OMP_NUM_THREADS": given}) == expected
    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"get_num_threads": staticmethod(lambda: 7)}))
    assert cores._limit(os.environ) == 7
