"""Rules without a training: helpers that build them and run a step of one bucket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.testing.memories import held, opened, send
from horovod_sparse.rules.testing.values import dense as written
from horovod_sparse.rules.testing.values import eighths
from horovod_sparse.vector import SparseVector

__all__ = ["eighths", "held", "opened", "send", "written"]

Array = NDArray[Any]
LIKE = np.zeros(0, np.float32)
NOWHERE = np.empty(0, np.int32)
SPREADS = ("normal", "wide", "flat", "shifted", "few", "sparse", "outliers")


def made(rule: Any, where: int | BucketContext, *more: Any, **options: Any) -> Any:
    """Return a rule for a bucket of ``where`` elements, or for a context, with options."""
    return rule(BucketContext(where, LIKE) if isinstance(where, int) else where, *more, rule.Options(**options))


def normal(seed: int, size: int) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def spread(generator: np.random.Generator, kind: str, size: int) -> Array:
    """Return random numbers of a distribution; their sums are exact, and so are sums of squares in float64."""
    values = {
        "normal": lambda: 100 * generator.standard_normal(size),
        "wide": lambda: 10 * generator.standard_cauchy(size).clip(-1e4, 1e4),
        "flat": lambda: generator.uniform(-100, 100, size),
        "shifted": lambda: 500 + 100 * generator.standard_normal(size),
        "few": lambda: generator.integers(-2, 3, size),
        "sparse": lambda: 100 * (generator.random(size) < 0.02),
        "outliers": lambda: np.where(generator.random(size) < 0.004, 3000, generator.standard_normal(size)),
    }[kind]()
    return (np.round(8 * values) / 8).astype(np.float32)


def take(sparsifier: Any, gradient: Array, k: int, number: int = 0) -> tuple[SparseVector, Array]:
    """Return the vector that a sparsifier takes out of a gradient, and the rest."""
    accumulator = Accumulator(np.zeros_like(gradient), [(0, gradient)])
    return sparsifier.take(accumulator, k, Step(number=number)), accumulator.settle()


def passes(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Return a list that records the calls of these methods on all accumulators."""
    calls: list[str] = []
    for name in names:
        whole = getattr(Accumulator, name)
        monkeypatch.setattr(
            Accumulator, name, lambda *given, whole=whole, name=name: calls.append(name) or whole(*given)
        )
    return calls


def some(generator: np.random.Generator, size: int, k: int) -> Array:
    """Return k random positions in ascending order."""
    return np.sort(generator.permutation(size)[:k]).astype(np.int32)


def assert_unbiased(samples: list[Array], expected: Array) -> None:
    """Assert that the mean of the samples is as expected, within five times the largest standard error of the mean."""
    error = np.std(samples, 0, ddof=1).max() / np.sqrt(len(samples))
    assert error > 0
    assert np.abs(np.mean(samples, 0) - expected).max() <= 5 * error
