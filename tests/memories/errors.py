"""Steps of a contractive memory, and what its error compressor holds."""

from __future__ import annotations

import numpy as np

from horovod_sparse.place import Place

LIKE = np.zeros(0, np.float32)


def eighths(generator, size):
    """Numbers whose sums are exact in float32."""
    return (generator.integers(-64, 64, size) / 8).astype(np.float32)


def step(memory, gradient, positions, returns=0, scale=1.0):
    """Sends the entries at some positions, the last ``returns`` of which come back.

    Returns:
        The accumulated gradient p, and what was sent and did not come back, D, both written out.
    """
    accumulator = memory.open([(0, gradient)], scale)
    accumulated = accumulator.settle().copy()
    vector = accumulator.take_at(positions, shared=True)
    kept = len(vector) - returns
    back = type(vector)(vector.indices[kept:], vector.values[kept:], vector.size)
    memory.close(accumulator, vector, back)
    delivered = np.zeros_like(gradient)
    delivered[positions[:kept]] = vector.values[:kept]
    return accumulated, delivered


def held(memory, size):
    """What the memory would feed back, written out: p without a gradient."""
    accumulator = memory.open([(0, np.zeros(size, np.float32))], 1.0)
    return accumulator.settle().copy()


def block(generator, size, k):
    """Random positions, ascending."""
    return np.sort(generator.permutation(size)[:k]).astype(np.int32)


def built(kind, size, **options):
    return kind(Place(size, LIKE), **options)
