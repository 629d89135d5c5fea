"""SIDCo: exponential distributions, each fitted to the tail beyond the previous threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import SPREADS, made, normal, passes, spread, take

from horovod_sparse.sparsifiers import SIDCo


def taken(gradient, k):
    return take(made(SIDCo, gradient.size), gradient, k)[0].indices


def published(acc, k):
    """Return the positions by the published rule, stage by stage."""
    magnitudes = np.abs(acc).astype(np.float64)
    density, left = k / acc.size, magnitudes
    if density >= 0.75:
        threshold, ratio, stages = -np.mean(left) * math.log(density), 1.0, 0
    else:
        threshold, ratio = -np.mean(left) * math.log(0.75), density / 0.75
        stages = math.ceil(math.log(ratio) / math.log(0.25))
    for stage in range(stages):
        left = left[left >= acc.dtype.type(threshold)]
        if not left.size:
            break
        fraction = 0.25 if stage < stages - 1 else ratio / 0.25 ** (stages - 1)
        threshold += (np.mean(left) - threshold) * -math.log(fraction)
    return np.flatnonzero(magnitudes >= acc.dtype.type(threshold))


@settings(max_examples=200)
@given(
    kind=st.sampled_from(SPREADS),
    size=st.integers(2, 2000),
    density=st.floats(0.001, 0.99),
    seed=st.integers(0, 999),
)
def test_sidco_selects_like_the_published_rule(kind, size, density, seed):
    gradient, k = spread(np.random.default_rng(seed), kind, size), max(1, round(density * size))
    if k < size and gradient.any() and len(expected := published(gradient, k)):
        assert np.array_equal(taken(gradient, k), expected)
        assert np.array_equal(taken(-gradient, k), expected)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("draw", "least", "most"),
    [
        (lambda generator, size: generator.laplace(size=size), 0.9, 1.1),
        (lambda generator, size: generator.standard_normal(size), 1.0, 1.5),
        (lambda generator, size: generator.standard_t(3, size), 0.4, 1.1),
    ],
    ids=["exponential magnitudes", "lighter tails", "heavier tails"],
)
def test_the_number_of_entries_is_near_k(density, draw, least, most):
    k = round(density * 200_000)
    numbers = draw(np.random.default_rng(1), 200_000).astype(np.float32)
    assert least * k <= len(taken(numbers, k)) <= most * k


def test_the_k_largest_are_selected_if_nothing_reaches_the_threshold():
    gradient = np.ones(1000, np.float32)
    assert len(published(gradient, 5)) == 0
    assert taken(gradient, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("k", "further"), [(1, 5), (10, 4), (100, 2), (500, 1), (800, 0)])
def test_every_stage_reads_the_bucket_once(monkeypatch, k, further):
    calls = passes(monkeypatch, "moments", "tail", "take_above", "take_largest", "count_reaching")
    taken(normal(3, 1000), k)
    assert calls == ["moments", *["tail"] * further, "take_above"]
