"""DGCSampling: a threshold from a sample, and never more than k entries."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import LIKE, SPREADS, made, normal, passes, spread, take

from horovod_sparse.rules import BucketContext
from horovod_sparse.sparsifiers import DGCSampling


def published(acc, k, start):
    """Return the positions by the published rule, with one pass per correction, and the threshold."""
    magnitudes, size = np.abs(acc), acc.size
    stride = max(1, size // max(math.ceil(size / 100), math.ceil(2 * size / k)))
    sample = np.sort(magnitudes[start(stride) :: stride])[::-1]
    threshold = float(sample[math.ceil(sample.size * k / size) - 1])
    chosen = magnitudes >= np.float32(threshold)
    for number in range(1, 11):
        if np.count_nonzero(chosen) < 0.8 * k:
            chosen = magnitudes >= np.float32(threshold * 0.8**number)
    positions = np.flatnonzero(chosen)
    return np.sort(positions[np.argsort(-magnitudes[positions], kind="stable")[:k]]), threshold


@settings(max_examples=60)
@given(
    kind=st.sampled_from(SPREADS),
    size=st.integers(2, 3000),
    density=st.floats(0.001, 0.9),
    seed=st.integers(0, 999),
)
def test_dgc_selects_like_the_published_rule(kind, size, density, seed):
    gradient, k = spread(np.random.default_rng(seed), kind, size), max(1, round(density * size))
    context = BucketContext(size, LIKE, bucket=1, rank=2, ranks=3)
    sparsifier = made(DGCSampling, context, seed=seed)
    for number in range(3):
        expected, threshold = published(gradient, k, context.generator(seed, number, shared=False).integers)
        if threshold > 0 and k < size:
            assert np.array_equal(take(sparsifier, gradient, k, number)[0].indices, expected)


@pytest.mark.parametrize("density", [0.001, 0.1])
def test_nearly_k_of_many_gradients_are_selected_the_largest_ones(density):
    gradient, k = normal(0, 200_000), round(density * 200_000)
    vector, rest = take(made(DGCSampling, gradient.size), gradient, k)
    assert 0.8 * k <= len(vector) <= k
    assert np.abs(vector.values).min() >= np.abs(rest).max()


@pytest.mark.parametrize(("others", "expected"), [(0.11, 400), (0.1, 200)])
def test_the_threshold_falls_at_most_ten_times(others, expected):
    """Only what is sampled is large, and it is half of k; 0.8^10 of it is 0.107, and 0.8^9 is 0.134."""
    start = int(BucketContext(20_000, LIKE).generator(0, 0, shared=False).integers(100))
    gradient = np.full(20_000, others, np.float32)
    gradient[start::100] = 1
    assert len(take(made(DGCSampling, gradient.size), gradient, 400)[0]) == expected


def test_one_pass_suffices_with_a_good_sample_and_three_always(monkeypatch):
    calls = passes(monkeypatch, "settle", "count_reaching", "take_above", "take_largest")
    gradient = normal(0, 100_000)
    take(made(DGCSampling, gradient.size), gradient, 1000)
    assert [call for call in calls if call != "settle"] == ["take_above"]
    calls.clear()
    gradient[::50] *= 1e4  # the sample has them all, or none
    for number in range(60):
        take(made(DGCSampling, gradient.size), gradient, 3000, number)
    assert calls.count("count_reaching") > 0
    assert calls.count("take_above") <= 60 + calls.count("count_reaching")
    assert not calls.count("take_largest")
