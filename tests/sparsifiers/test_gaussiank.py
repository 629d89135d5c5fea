"""GaussianK: the threshold that a normal distribution would have, corrected until three have been evaluated."""

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
    """Return the positions that reach the last evaluated threshold, as in the authors' code."""
    magnitudes, wide = np.abs(acc), acc.astype(np.float64)
    deviation = np.sqrt(max(0.0, np.mean(wide**2) - np.mean(wide) ** 2))
    threshold = np.abs(np.mean(wide)) - deviation * NormalDist().inv_cdf(k / acc.size / 2)
    for _ in range(3):
        selected = np.flatnonzero(magnitudes >= np.float32(threshold))
        if len(selected) < 2 / 3 * k:
            threshold *= 0.5
        elif len(selected) > 4 / 3 * k:
            threshold *= 1.5
        else:
            break
    return selected


@settings(max_examples=300)
@given(
    kind=st.sampled_from(SPREADS),
    size=st.integers(2, 2000),
    density=st.floats(0.001, 0.99),
    seed=st.integers(0, 999),
)
def test_gaussiank_selects_like_the_published_rule(kind, size, density, seed):
    gradient, k = spread(np.random.default_rng(seed), kind, size), max(1, round(density * size))
    if k < size and gradient.any() and len(expected := published(gradient, k)):
        assert np.array_equal(taken(gradient, k), expected)
        assert np.array_equal(taken(-gradient, k), expected)


@pytest.mark.parametrize("density", [0.001, 0.1])
def test_normal_gradients_give_about_k_entries(density):
    k = round(density * 100_000)
    assert 2 / 3 * k <= len(taken(normal(1, 100_000), k)) <= 4 / 3 * k


def test_the_k_largest_are_selected_if_nothing_reaches_the_threshold():
    signs = np.where(np.arange(100_000) % 2, np.float32(1), np.float32(-1))  # the last threshold is 1.1
    assert len(published(signs, 1)) == 0
    assert taken(signs, 1).tolist() == [0]


@pytest.mark.parametrize("kind", ["normal", "wide", "outliers"])
def test_the_bucket_is_read_at_most_four_times(kind, monkeypatch):
    calls = passes(monkeypatch, "moments", "count_reaching", "take_above", "take_largest")
    for k in (10, 100, 300):
        calls.clear()
        taken(spread(np.random.default_rng(3), kind, 1000), k)
        assert calls[:2] == ["moments", "take_above"]
        assert set(calls[2:]) <= {"take_above"}
        assert len(calls) <= 4
