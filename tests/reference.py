"""What every kernel computes, in readable NumPy; the kernels must give the same bits.

The functions have the names and signatures of horovod_sparse.kernels.cpu, without its options for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Segments = Sequence[tuple[int, Array]]


def magnitude(x: Array) -> Array:
    """Bits of the absolute value, as integers that are ordered like it; NaN above infinity."""
    bits = np.abs(x).view(np.int32 if x.dtype == np.float32 else np.int64)
    return bits & np.iinfo(bits.dtype).max


def accumulate(gradients: Segments, buffer: Array, scale: float = 1.0) -> None:
    if scale == 0:
        buffer[:] = 0
    else:
        buffer *= buffer.dtype.type(scale)
    for start, gradient in gradients:
        buffer[start : start + len(gradient)] += gradient.astype(buffer.dtype)


def active_positions(gradients: Segments) -> Array:
    ranges = [np.arange(start, start + len(gradient)) for start, gradient in gradients]
    return np.concatenate([np.arange(0), *ranges])


def take(positions: Array, buffer: Array) -> tuple[Array, Array]:
    """Moves positions, which ascend, out of the buffer."""
    values = buffer[positions]
    buffer[positions] = 0
    return positions.astype(np.int32), values


def select(gradients: Segments, buffer: Array, k: int, scale: float = 1.0) -> tuple[Array, Array]:
    accumulate(gradients, buffer, scale)
    positions = active_positions(gradients)
    largest_first = np.argsort(-magnitude(buffer[positions]), kind="stable")
    return take(np.sort(positions[largest_first[:k]]), buffer)


def select_above(gradients: Segments, buffer: Array, threshold: float, scale: float = 1.0) -> tuple[Array, Array]:
    accumulate(gradients, buffer, scale)
    positions = active_positions(gradients)
    reaches = magnitude(buffer[positions]) >= magnitude(np.array([threshold], buffer.dtype))
    return take(positions[reaches], buffer)


def all_finite(gradients: Segments) -> bool:
    return all(bool(np.isfinite(gradient).all()) for _, gradient in gradients)


def merge_sum(vectors: Sequence[tuple[Array, Array]], size: int) -> tuple[Array, Array]:
    total = np.zeros(size, vectors[0][1].dtype)
    present = np.zeros(size, bool)
    for indices, values in vectors:
        total[indices] = np.where(present[indices], total[indices] + values, values)
        present[indices] = True
    union = np.flatnonzero(present)
    return union.astype(np.int32), total[union]


def exclude(indices: Array, values: Array, others: Array) -> tuple[Array, Array]:
    stays = ~np.isin(indices, others)
    return indices[stays], values[stays]


def cut(indices: Array, values: Array, k: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    largest = np.zeros(len(values), bool)
    largest[np.argsort(-magnitude(values), kind="stable")[:k]] = True
    return (indices[largest], values[largest]), (indices[~largest], values[~largest])


def count_magnitudes(values: Array, prefix: int, shift: int, bits: int) -> Array:
    keys = magnitude(values)
    agrees = keys >> (shift + bits) == prefix >> (shift + bits)
    return np.bincount(keys[agrees] >> shift & (2**bits - 1), minlength=2**bits)


def scatter(indices: Array | None, values: Array, outputs: Segments, scale: float = 1.0) -> None:
    scaled = values * values.dtype.type(scale)
    if indices is None:
        indices = np.arange(len(values))
    for start, output in outputs:
        inside = (indices >= start) & (indices < start + len(output))
        narrow = scaled[inside]
        if output.dtype.itemsize == 2:
            narrow = narrow.astype(np.float32)
        output[:] = 0
        output[indices[inside] - start] = narrow.astype(output.dtype)


def add(indices: Array | None, values: Array, buffer: Array) -> None:
    buffer[slice(None) if indices is None else indices] += values
