"""The laws of sparsifiers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.rules import Accumulator, SparseVector, Step
from horovod_sparse.rules.testing.values import digest_of, eighths, fail_together, place_of


@dataclass(frozen=True)
class Bucket:
    """One example: the bucket's size, the parts of it that are not held, k, and its numbers in eighths.

    The larger ``most``, the fewer numbers are zero or equal.
    """

    size: int
    parts: tuple[tuple[int, int], ...]
    k: int
    most: int
    dtype: str = "float32"


_BUCKETS = [
    Bucket(1, ((0, 1),), 1, 200),
    Bucket(7, ((0, 7),), 3, 1, "float64"),
    Bucket(300, ((0, 300),), 20, 100_000),
    Bucket(300, ((0, 300),), 20, 100_000, "float64"),
    Bucket(300, ((10, 120), (200, 290)), 20, 100_000),
    Bucket(300, (), 20, 200),
    Bucket(300, ((0, 300),), 400, 200),
    Bucket(300, ((0, 300),), 10, 0),
    Bucket(5000, ((0, 5000),), 50, 200),
]


def check_sparsifier(transport: Any, rule: Any, **options: Any) -> None:
    """Lets a sparsifier take entries out of accumulators of several kinds, in three steps each; a collective call.

    Laws: what was in the accumulator is what was taken and what is left; positions ascend, and those that are held
    stay; one that takes over another one's state takes the same; where ranks share positions, they have the same; and
    numbers that are not finite, or hardly numbers, neither hang nor crash it.

    Args:
        transport: Connects the ranks, of which there may be any number.
        rule: The class.
        **options: Of the rule; they must fit buckets of any size.

    Raises:
        AssertionError: A law does not hold; on all ranks.
    """

    def build(size: int, dtype: str) -> Any:
        return rule(place_of(transport, size, dtype), rule.Options(**options))

    for bucket in _BUCKETS:
        failures, vectors = take(
            partial(build, bucket.size, bucket.dtype), bucket, np.random.default_rng(transport.rank)
        )
        positions = [digest_of(SparseVector(one.indices, one.values[:0], one.size)) for one in vectors if one.shared]
        if transport.broadcast_object(positions) != positions:
            failures.append("ranks that share positions have the same")
        fail_together(transport, [f"{law}, in {bucket}" for law in failures])
    for bad in (np.nan, np.inf, 3e38, 1e-45):
        take_extreme(build(1000, "float32"), bad)


def take(
    build: Callable[[], Any], bucket: Bucket, generator: np.random.Generator
) -> tuple[list[str], list[SparseVector]]:
    """Three steps of a sparsifier: the laws that do not hold, and what was taken.

    Args:
        build: Makes a sparsifier for the bucket.
        bucket: The bucket.
        generator: Of the gradients.
    """
    sparsifier, failures, vectors = build(), set(), []
    buffer, active = _numbers(generator, bucket), np.zeros(bucket.size, bool)
    for start, stop in bucket.parts:
        active[start:stop] = True
    for number, scale in enumerate((0.5, 1.0, 1.0)):
        gradient, restored, same = _numbers(generator, bucket), build(), buffer.copy()
        segments = [(start, gradient[start:stop]) for start, stop in bucket.parts]
        before = buffer * buffer.dtype.type(scale) + np.where(active, gradient, 0)
        restored.load_state_dict(copy.deepcopy(sparsifier.state_dict()))
        again = restored.take(Accumulator(same, segments, scale), bucket.k, Step(number=number))
        accumulator = Accumulator(buffer, segments, scale)
        vector = sparsifier.take(accumulator, bucket.k, Step(number=number))
        accumulator.settle()

        indices, values = vector.entries
        kinds = (indices.dtype, values.dtype, vector.size) == (np.int32, buffer.dtype, bucket.size)
        after = buffer.copy()
        after[indices] += values
        laws = {
            "dtypes and size are those of the bucket": kinds,
            "positions ascend": bool((np.diff(indices) > 0).all()),
            "nothing is lost": np.array_equal(after, before),
            "what was taken is gone": not buffer[indices][active[indices]].any(),
            "what is held stays": not values[~active[indices]].any(),
            "shares_indices says whether positions are shared": vector.shared == sparsifier.shares_indices,
            "a restored one takes the same": digest_of(again) == digest_of(vector) and np.array_equal(same, buffer),
        }
        failures |= {law for law, holds in laws.items() if not holds}
        vectors.append(vector)
    return sorted(failures), vectors


def take_extreme(sparsifier: Any, bad: float) -> None:
    """Lets a sparsifier of 1000 elements meet some numbers, then many, that are not finite or hardly numbers."""
    generator = np.random.default_rng(0)
    for share in (0.01, 1.0):
        gradient = generator.standard_normal(1000).astype(np.float32)
        gradient[generator.random(1000) < share] = bad
        buffer = np.zeros(1000, np.float32)
        for number in range(3):
            vector = sparsifier.take(Accumulator(buffer, [(0, gradient)]), 10, Step(number=number))
            assert (np.diff(vector.entries[0]) > 0).all(), f"positions ascend, among {bad}"


def _numbers(generator: np.random.Generator, bucket: Bucket) -> NDArray[Any]:
    return eighths(generator, bucket.size, bucket.most, bucket.dtype)
