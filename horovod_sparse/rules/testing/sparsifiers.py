"""Test of the laws of sparsifiers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.rules import Accumulator, SparseVector, Step
from horovod_sparse.rules.testing.values import context_of, digest_of, eighths, fail_together


@dataclass(frozen=True)
class Bucket:
    """One test case.

    Attributes:
        size: Number of elements.
        parts: Ranges (start, stop) that have gradients; all other positions are held.
        k: Number of entries to select.
        most: Largest magnitude of the numbers, in eighths. The larger it is, the fewer numbers are zero or equal.
        dtype: "float32" or "float64".
        layers: First positions of the parameters, as in ``BucketContext``.
    """

    size: int
    parts: tuple[tuple[int, int], ...]
    k: int
    most: int
    dtype: str = "float32"
    layers: tuple[int, ...] = (0,)


_BUCKETS = [
    Bucket(1, ((0, 1),), 1, 200),
    Bucket(7, ((0, 7),), 3, 1, "float64"),
    Bucket(300, ((0, 300),), 20, 100_000),
    Bucket(300, ((0, 300),), 20, 100_000, "float64"),
    Bucket(300, ((10, 120), (200, 290)), 20, 100_000),
    Bucket(300, ((0, 300),), 20, 100_000, layers=(0, 1, 120, 290)),
    Bucket(300, ((120, 290),), 20, 100_000, layers=(0, 120, 290)),
    Bucket(300, (), 20, 200),
    Bucket(300, ((0, 300),), 400, 200),
    Bucket(300, ((0, 300),), 10, 0),
    Bucket(5000, ((0, 5000),), 50, 200),
]


def check_sparsifier(transport: Any, rule: Any, **options: Any) -> None:
    """Test the laws of a sparsifier on several buckets, three steps each; a collective call.

    Laws: the content of the accumulator equals the selected entries plus the rest. Positions ascend, and held positions
    keep their content. A sparsifier that loads the state of another selects the same entries. If it shares indices,
    positions are equal on all ranks. NaN, infinity, huge and subnormal numbers neither hang nor crash it.

    Args:
        transport: Transport between the ranks; any world size.
        rule: The sparsifier class.
        **options: Options of the sparsifier; must be valid for buckets of any size.

    Raises:
        AssertionError: A law is violated; raised on all ranks.
    """

    def build(size: int, dtype: str, layers: Sequence[int] = (0,)) -> Any:
        return rule(context_of(transport, size, dtype, layers), rule.Options(**options))

    for bucket in _BUCKETS:
        failures, vectors = take(
            partial(build, bucket.size, bucket.dtype, bucket.layers), bucket, np.random.default_rng(transport.rank)
        )
        shared = [vector for vector in vectors if vector.shared]
        positions = [digest_of(SparseVector(vector.indices, vector.values[:0], vector.size)) for vector in shared]
        if transport.broadcast_object(positions) != positions:
            failures.append("shared positions are equal on all ranks")
        fail_together(transport, [f"{law}, in {bucket}" for law in failures])
    for bad in (np.nan, np.inf, 3e38, 1e-45):
        take_extreme(build(1000, "float32"), bad)


def take(
    build: Callable[[], Any], bucket: Bucket, generator: np.random.Generator
) -> tuple[list[str], list[SparseVector]]:
    """Run three steps of a sparsifier; return the violated laws, sorted, and the vector of each step."""
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
            "selected entries plus the rest equal the input": np.array_equal(after, before),
            "selected entries leave the accumulator": not buffer[indices][active[indices]].any(),
            "held positions are selected with value 0 only": not values[~active[indices]].any(),
            "shared of the vector equals shares_indices": vector.shared == sparsifier.shares_indices,
            "a restored sparsifier selects the same entries": digest_of(again) == digest_of(vector)
            and np.array_equal(same, buffer),
        }
        failures |= {law for law, holds in laws.items() if not holds}
        vectors.append(vector)
    return sorted(failures), vectors


def take_extreme(sparsifier: Any, bad: float) -> None:
    """Run a sparsifier of 1000 elements on gradients that contain ``bad`` at about 1 %, then at all positions."""
    generator = np.random.default_rng(0)
    for share in (0.01, 1.0):
        gradient = generator.standard_normal(1000).astype(np.float32)
        gradient[generator.random(1000) < share] = bad
        buffer = np.zeros(1000, np.float32)
        for number in range(3):
            vector = sparsifier.take(Accumulator(buffer, [(0, gradient)]), 10, Step(number=number))
            assert (np.diff(vector.entries[0]) > 0).all(), f"positions ascend, with {bad} among the gradients"


def _numbers(generator: np.random.Generator, bucket: Bucket) -> NDArray[Any]:
    return eighths(generator, bucket.size, bucket.most, bucket.dtype)
