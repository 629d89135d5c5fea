"""The kernel's count of this node's connections, and when it agrees with ours."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cluster.socket_bytes import Comparison, random_vector


@pytest.mark.parametrize(
    ("counted", "agrees"), [(10_000, True), (9_901, True), (10_099, True), (9_899, False), (10_101, False)]
)
def test_counts_agree_within_one_percent(counted, agrees):
    sockets = np.full((2, 2), 10_000)
    for column in (0, 1):
        ours = sockets.copy()
        ours[:, column] = counted
        assert Comparison(ours, sockets).agrees() is agrees


def test_the_rank_that_is_farthest_off_is_shown():
    comparison = Comparison(np.array([[100, 100], [100, 100]]), np.array([[100, 80], [100, 120]]))
    assert comparison.ratios().tolist() == [1, 1]
    assert comparison.worst() == 100 / 80


def test_shared_vectors_have_the_same_positions_on_every_rank_and_others_do_not():
    first, second = (random_vector(1000, 50, rank, shared=True) for rank in (0, 1))
    assert np.array_equal(first.indices, second.indices)
    assert not np.array_equal(first.values, second.values)
    assert not np.array_equal(random_vector(1000, 50, 0, False).indices, random_vector(1000, 50, 1, False).indices)
