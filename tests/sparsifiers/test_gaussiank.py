"""GaussianK: the threshold that a normal distribution would have, corrected at most three times."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import GaussianK

PLACE = Place(100, np.zeros(0, np.float32))


def take(gradient, k):
    accumulator = Accumulator(np.zeros_like(gradient), [(0, gradient)])
    return GaussianK(PLACE).take(accumulator, k, lambda array: array).indices


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


def eighths(generator, kind, size):
    """Gradients whose sums and squares are exact, spread as named."""
    values = {
        "normal": lambda: 100 * generator.standard_normal(size),
        "wide": lambda: 10 * generator.standard_cauchy(size).clip(-1e4, 1e4),
        "flat": lambda: generator.uniform(-100, 100, size),
        "shifted": lambda: 500 + 100 * generator.standard_normal(size),
        "few": lambda: 100 * (generator.random(size) < 0.1),
        "outliers": lambda: np.where(generator.random(size) < 0.004, 3000, generator.standard_normal(size)),
    }
    return (np.round(8 * values[kind]()) / 8).astype(np.float32)


@given(
    kind=st.sampled_from(["normal", "wide", "flat", "shifted", "few", "outliers"]),
    size=st.integers(2, 2000),
    density=st.sampled_from([0.001, 0.01, 0.1, 0.4, 0.9]),
    seed=st.integers(0, 999),
)
def test_it_takes_what_the_published_rule_takes(kind, size, density, seed):
    gradient, k = eighths(np.random.default_rng(seed), kind, size), max(1, round(density * size))
    expected = published(gradient, k)
    if k < size and gradient.any() and len(expected):
        assert np.array_equal(take(gradient, k), expected)


@pytest.mark.parametrize("kind", ["normal", "wide"])
def test_it_takes_what_the_published_rule_takes_at_every_density(kind):
    gradient = eighths(np.random.default_rng(4), kind, 600)
    for k in range(1, 600):
        expected = published(gradient, k)
        assert not len(expected) or np.array_equal(take(gradient, k), expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_normal_gradients_give_about_k_entries(sign, density):
    gradient = sign * np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
    k = round(density * gradient.size)
    assert 2 / 3 * k <= len(take(gradient, k)) <= 4 / 3 * k


def test_of_two_ranks_with_opposite_gradients_both_choose_the_same():
    gradient = eighths(np.random.default_rng(2), "shifted", 1000)
    assert np.array_equal(take(gradient, 10), take(-gradient, 10))


def test_where_nothing_reaches_the_threshold_the_k_largest_leave():
    constant = np.full(100, 0.125, np.float32)  # the threshold is this number, then 1.5, 0.75 and 1.125 times as much
    assert len(published(constant, 5)) == 0
    assert take(constant, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["normal", "wide", "outliers"])
def test_the_bucket_is_read_at_most_four_times(kind, monkeypatch):
    passes = []
    for name in ("moments", "count_reaching", "take_above", "take_largest"):
        whole = getattr(Accumulator, name)
        monkeypatch.setattr(
            Accumulator, name, lambda *given, whole=whole, name=name: passes.append(name) or whole(*given)
        )
    for k in (10, 100, 300):
        passes.clear()
        take(eighths(np.random.default_rng(3), kind, 1000), k)
        assert passes in (["moments", "take_above"], ["moments", "take_above", "count_reaching", "take_above"])
