"""RedSync: a bisection between the mean and the largest magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rules import SPREADS, made, spread, take

from horovod_sparse.sparsifiers import RedSync


def taken(gradient, k):
    return take(made(RedSync, gradient.size), gradient, k)[0].indices


def published(acc, k):
    """Return the positions by the published rule, with one count per step of the bisection."""
    magnitudes = np.abs(acc)
    mean, largest = np.mean(magnitudes, dtype=np.float64), float(magnitudes.max())
    low, high = 0.0, 1.0
    while high - low >= 0.2:
        ratio = (low + high) / 2
        threshold = mean + ratio * (largest - mean)
        chosen = magnitudes >= np.float32(threshold)
        count = np.count_nonzero(chosen)
        if k <= count < 2 * k:
            break
        low, high = (low, ratio) if count < k else (ratio, high)
    return np.flatnonzero(chosen)


@given(
    kind=st.sampled_from(SPREADS),
    size=st.integers(2, 2000),
    density=st.floats(0.001, 0.9),
    seed=st.integers(0, 999),
)
def test_redsync_selects_like_the_published_rule(kind, size, density, seed):
    gradient, k = spread(np.random.default_rng(seed), kind, size), max(1, round(density * size))
    if k < size and gradient.any():
        assert np.array_equal(taken(gradient, k), published(gradient, k))


@pytest.mark.parametrize("exponent", range(1, 8))
def test_every_threshold_of_the_bisection_can_be_found(exponent):
    """Magnitudes for which only one threshold has k to 2k entries."""
    gradient = np.zeros(10_000, np.float32)
    gradient[:1] = 8
    gradient[1:100] = exponent + 0.5  # reaches r = exponent/8 and no higher
    gradient[100:1000] = exponent - 0.5
    assert 90 <= len(taken(gradient, 90)) < 180


@pytest.mark.parametrize(("k", "found"), [(10, 12), (12, 12), (13, 25), (25, 25)])
def test_the_search_ends_from_k_to_below_2k_entries(k, found):
    gradient = np.zeros(1000, np.float32)
    gradient[:25] = 4.5  # r = 1/2, the first that is tried, is at 4.1
    gradient[:12] = 6.5  # r = 3/4, the next, is at 6.0
    gradient[0] = 8
    assert len(taken(gradient, k)) == found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_magnitudes_are_selected_although_their_mean_is_rounded(dtype):
    for size in range(2, 100):
        for value in (0.1, 0.7, 0.9):
            assert len(taken(np.full(size, value, dtype), 1)) == size
