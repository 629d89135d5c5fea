"""DGCSampling: a threshold out of a sample, and never more than k entries."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers import DGCSampling

LIKE = np.zeros(0, np.float32)


def take(sparsifier, gradient, k):
    accumulator = Accumulator(np.zeros_like(gradient), [(0, gradient)])
    return sparsifier.take(accumulator, k, lambda array: array).indices


def published(acc, k, start):
    """The rule as it is written down: one pass for each correction."""
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


def spread(generator, kind, size):
    values = {
        "normal": generator.standard_normal,
        "wide": generator.standard_cauchy,
        "few": lambda size: np.where(generator.random(size) < 0.3, generator.integers(-3, 4, size), 1e-3),
        "sparse": lambda size: np.where(generator.random(size) < 0.01, generator.standard_normal(size), 0),
    }
    return values[kind](size).astype(np.float32)


@given(
    kind=st.sampled_from(["normal", "wide", "few", "sparse"]),
    size=st.integers(2, 3000),
    density=st.sampled_from([0.001, 0.01, 0.1, 0.4, 0.9]),
    seed=st.integers(0, 999),
)
def test_it_takes_what_the_published_rule_takes(kind, size, density, seed):
    gradient, k = spread(np.random.default_rng(seed), kind, size), max(1, round(density * size))
    place = Place(size, LIKE, bucket=1, rank=2, ranks=3)
    sparsifier = DGCSampling(place, seed=seed)
    for step in range(3):
        expected, threshold = published(gradient, k, place.generator(seed, step, shared=False).integers)
        taken = take(sparsifier, gradient, k)
        if threshold > 0 and k < size:
            assert np.array_equal(taken, expected)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_of_many_gradients_nearly_k_leave_and_the_largest(density):
    gradient = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    k = round(density * gradient.size)
    taken = take(DGCSampling(Place(gradient.size, LIKE)), gradient, k)
    assert 0.8 * k <= len(taken) <= k
    rest = np.delete(np.abs(gradient), taken)
    assert np.abs(gradient[taken]).min() >= rest.max()


@pytest.mark.parametrize(("others", "expected"), [(0.11, 400), (0.1, 200)])
def test_the_threshold_falls_at_most_ten_times(others, expected):
    """Only what is sampled is large, and it is half of k; 0.8^10 of it is 0.107, and 0.8^9 is 0.134."""
    start = int(Place(20_000, LIKE).generator(0, 0, shared=False).integers(100))
    gradient = np.full(20_000, others, np.float32)
    gradient[start::100] = 1
    assert len(take(DGCSampling(Place(gradient.size, LIKE)), gradient, 400)) == expected


def test_where_most_gradients_are_zero_no_zeros_are_taken_in_place_of_others():
    gradient = np.zeros(10_000, np.float32)
    gradient[[5, 700, 9000]] = [1, -2, 3]
    assert {5, 700, 9000} <= set(take(DGCSampling(Place(10_000, LIKE)), gradient, 10).tolist())


def test_ranks_and_steps_sample_at_different_positions(monkeypatch):
    starts = []
    monkeypatch.setattr(
        Accumulator, "sample", lambda self, start, stride: starts.append(start) or self.gradients[0][1][start::stride]
    )
    gradient = np.ones(100_000, np.float32)
    for rank in range(2):
        sparsifier = DGCSampling(Place(gradient.size, LIKE, rank=rank))
        for _ in range(5):
            take(sparsifier, gradient, 1000)
    assert len(set(starts)) > 5
    assert starts[:5] != starts[5:]
    assert all(0 <= start < 100 for start in starts)


def test_one_pass_does_where_the_sample_is_right_and_never_more_than_three(monkeypatch):
    passes = []
    for name in ("settle", "count_reaching", "take_above", "take_largest"):
        whole = getattr(Accumulator, name)
        monkeypatch.setattr(
            Accumulator, name, lambda *given, whole=whole, name=name: passes.append(name) or whole(*given)
        )
    normal = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    take(DGCSampling(Place(normal.size, LIKE)), normal, 1000)
    assert passes == ["take_above"]
    passes.clear()
    tall = normal.copy()
    tall[::50] *= 1e4  # the sample has them all, or none
    for seed in range(100):
        take(DGCSampling(Place(normal.size, LIKE), seed=seed), tall, 3000)
    assert passes.count("count_reaching") > 0
    assert passes.count("take_above") <= 100 + passes.count("count_reaching")
    assert not passes.count("take_largest")
