"""GaussianK: the threshold that a normal distribution would have, corrected at most three times."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import SPREADS, made, normal, passes, spread, take

from horovod_sparse.sparsifiers import GaussianK


def taken(gradient, k):
    return take(made(GaussianK, gradient.size), gradient, k)[0].indices


def published(acc, k):
    """One count for each correction, as the rule is written down."""
    magnitudes, wide = np.abs(acc), acc.astype(np.float64)
    deviation = np.sqrt(max(0.0, np.mean(wide**2) - np.mean(wide) ** 2))
    threshold = np.abs(np.mean(wide)) - deviation * NormalDist().inv_cdf(k / acc.size / 2)
    for _ in range(3):
        count = np.count_nonzero(magnitudes >= np.float32(threshold))
        if count < 2 / 3 * k:
            threshold *= 0.5
        elif count > 4 / 3 * k:
            threshold *= 1.5
        else:
            break
    return np.flatnonzero(magnitudes >= np.float32(threshold))


@settings(max_examples=300)
@given(
    kind=st.sampled_from(SPREADS),
    size=st.integers(2, 2000),
    density=st.floats(0.001, 0.99),
    seed=st.integers(0, 999),
)
def test_it_takes_what_the_published_rule_takes(kind, size, density, seed):
    gradient, k = spread(np.random.default_rng(seed), kind, size), max(1, round(density * size))
    if k < size and gradient.any() and len(expected := published(gradient, k)):
        assert np.array_equal(taken(gradient, k), expected)
        assert np.array_equal(taken(-gradient, k), expected)


@pytest.mark.parametrize("density", [0.001, 0.1])
def test_normal_gradients_give_about_k_entries(density):
    k = round(density * 100_000)
    assert 2 / 3 * k <= len(taken(normal(1, 100_000), k)) <= 4 / 3 * k


def test_where_nothing_reaches_the_threshold_the_k_largest_leave():
    constant = np.full(100, 0.125, np.float32)  # the threshold is this number, then 1.5, 0.75 and 1.125 times as much
    assert len(published(constant, 5)) == 0
    assert taken(constant, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["normal", "wide", "outliers"])
def test_the_bucket_is_read_at_most_four_times(kind, monkeypatch):
    calls = passes(monkeypatch, "moments", "count_reaching", "take_above", "take_largest")
    for k in (10, 100, 300):
        calls.clear()
        taken(spread(np.random.default_rng(3), kind, 1000), k)
        assert calls in (["moments", "take_above"], ["moments", "take_above", "count_reaching", "take_above"])
