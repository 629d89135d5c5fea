"""Statistics of a bucket on the device; kernels.protocol documents them.

Functions that return Python numbers or NumPy arrays synchronize once, for one small copy; the others do not.
"""

from __future__ import annotations

import math

import cupy
import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.cuda.launch import (
    Module,
    Table,
    blocks_for,
    check_real,
    check_scale,
    multiprocessors,
    real_of,
    upload,
    zeros,
)
from horovod_sparse.kernels.types import MAX_SIZE, Array, Moments, Segments

_FEW, _MOST = 4, 16  # thresholds per launch; the kernel is compiled for both
_MODULE = Module(
    "statistics",
    templates=["measure", "score", "sample"],
    plain=[
        *(f"count_reaching<{real}, {most}>" for real in ("float", "double") for most in (_FEW, _MOST)),
        *("add_moments", "square", "add_squares", "add_scores", "find_largest"),
    ],
)

_TILE, _BLOCK = 2048, 16 * 2048  # elements summed in a fixed order; must match csrc/common/sums.hpp
_LANES = 8  # threads per tile
_COUNTED_TILE = 4096
_SEARCHED_PART = 4096
_BLOCKS_PER_PROCESSOR = 8


def accumulate_moments(gradients: Segments, buffer: Array, scale: float = 1.0, threads: int = 1) -> Moments:
    """Implement ``cpu.accumulate_moments``; synchronizes once, for the sums."""
    del threads
    table = Table(gradients, check_real(buffer, "buffer").size)
    factor = check_scale(scale, buffer)
    blocks = blocks_for(buffer.size, _BLOCK)
    results = cupy.empty(len(Moments._fields) - 1 + 4 * blocks, np.float64)
    moments, size = results[4:], np.int64(buffer.size)
    _MODULE.launch(f"measure<{real_of(buffer)}>", blocks, table.device, table.count, buffer, size, factor, moments)
    if not table.active:
        return Moments(0, 0.0, 0.0, 0.0, 0.0)
    _MODULE.launch("add_moments", 1, moments, np.int64(blocks), results, threads=128)
    return Moments(table.active, *results[:4].get().tolist())


def count_reaching(
    gradients: Segments, buffer: Array, thresholds: NDArray[np.float64], threads: int = 1
) -> NDArray[np.int64]:
    """Implement ``cpu.count_reaching`` with thresholds in a NumPy array; synchronizes once, for the counts."""
    del threads
    table = Table(gradients, check_real(buffer, "buffer").size)
    number = _check_thresholds(thresholds)
    if not number or not table.active:
        return np.zeros(number, np.int64)
    most = _FEW if number <= _FEW else _MOST
    low = np.full(most, np.inf, buffer.dtype)
    with np.errstate(over="ignore"):
        low[:number] = thresholds
    counts = zeros(most, np.int64)
    blocks = min(blocks_for(buffer.size, _COUNTED_TILE), _BLOCKS_PER_PROCESSOR * multiprocessors())
    _MODULE.launch(
        f"count_reaching<{real_of(buffer)}, {most}>",
        blocks,
        *(table.device, table.count, buffer, np.int64(buffer.size), upload(low.view(np.uint8)), counts),
    )
    host: NDArray[np.int64] = counts.get()[:number]
    return host


def tail(gradients: Segments, buffer: Array, threshold: float, threads: int = 1) -> tuple[int, float]:
    """Implement ``cpu.tail``, in an array of the buffer's size; synchronizes twice, for the count and for the sum."""
    if not threshold >= 0:
        raise ValueError(f"threshold must be 0 or more, not {threshold}")
    (count,) = count_reaching(gradients, buffer, np.array([threshold])).tolist()
    with np.errstate(over="ignore"):
        low = buffer.dtype.type(threshold)
    kept = np.where(np.abs(buffer) < low, buffer.dtype.type(0), buffer)
    segments = [(start, kept[start : start + gradient.size]) for start, gradient in gradients]
    return count, accumulate_moments(segments, np.empty_like(buffer), 0.0, threads).magnitudes


def _check_thresholds(thresholds: NDArray[np.float64]) -> int:
    """Return the number of thresholds after checking them."""
    if not isinstance(thresholds, np.ndarray):
        raise TypeError(f"thresholds: expected a NumPy array, not {type(thresholds)}")
    if thresholds.dtype != np.float64:
        raise ValueError(f"thresholds: dtype {thresholds.dtype} is not float64")
    if thresholds.ndim != 1:
        raise ValueError(f"thresholds: expected one dimension, not {thresholds.ndim}")
    if thresholds.size > _MOST:
        raise ValueError(f"thresholds: {thresholds.size}, but at most {_MOST} at a time")
    for threshold in thresholds:
        if not threshold >= 0:
            raise ValueError(f"thresholds must be 0 or more, not {threshold}")
    return thresholds.size


def square_norm(gradients: Segments) -> float:
    """Implement ``cpu.square_norm``; synchronizes once, for the result."""
    table = Table(gradients, MAX_SIZE)
    if not table.active:
        return 0.0
    parts = _parts(table, _TILE)
    sums = cupy.empty(1 + int(table.count) + parts, np.float64)
    result, norms, squares = sums[:1], sums[1:], sums[1 + int(table.count) :]
    blocks = blocks_for(parts * _LANES)
    _MODULE.launch("square", blocks, table.device, table.count, np.int64(parts), squares)
    _MODULE.launch("add_squares", 1, table.device, table.count, squares, norms, result, threads=512)
    return float(result.get()[0])


def _parts(table: Table, length: int) -> int:
    """Return an upper bound of the number of parts if tensors are split into parts of at most ``length`` elements."""
    return table.active // length + int(table.count)


def block_scores(gradients: Segments, buffer: Array, block: int, threads: int = 1) -> Array:
    """Implement ``cpu.block_scores``; the scores are in device memory. Does not synchronize."""
    del threads
    table = Table(gradients, check_real(buffer, "buffer").size)
    if block < 1:
        raise ValueError(f"block must be 1 or more, not {block}")
    length = min(block, max(buffer.size, 1))
    blocks, tiles_each = blocks_for(buffer.size, length), blocks_for(length, _TILE)
    scores: Array = cupy.empty(blocks, np.float64)
    tiles = scores if tiles_each == 1 else cupy.empty(blocks * tiles_each, np.float64)
    _MODULE.launch(
        f"score<{real_of(buffer)}>",
        blocks_for(tiles.size * _LANES),
        *(table.device, table.count, buffer, np.int64(buffer.size), np.int64(length)),
        *(np.uint32(tiles_each), np.uint32(tiles.size), tiles),
    )
    if tiles_each > 1:
        _MODULE.launch("add_scores", blocks_for(blocks, 8), tiles, np.int64(tiles_each), np.int64(blocks), scores)
    return scores


def sample(gradients: Segments, buffer: Array, scale: float, start: int, stride: int) -> Array:
    """Implement ``cpu.sample``; does not synchronize."""
    if stride < 1:
        raise ValueError(f"stride must be 1 or more, not {stride}")
    if not 0 <= start < stride:
        raise ValueError(f"start must be 0 or more and below the stride, {stride}, not {start}")
    table = Table(gradients, check_real(buffer, "buffer").size)
    factor = check_scale(scale, buffer)
    values: Array = cupy.empty(len(range(start, table.active, stride)), buffer.dtype)
    _MODULE.launch(
        f"sample<{real_of(buffer)}>",
        blocks_for(values.size),
        *(table.device, table.count, buffer, factor, np.int64(start), np.int64(min(stride, MAX_SIZE))),
        *(np.int64(values.size), values),
    )
    return values


def largest(gradients: Segments) -> float:
    """Implement ``cpu.largest``; synchronizes once, for the result."""
    table = Table(gradients, MAX_SIZE)
    if not table.active:
        return 0.0
    found = zeros(1, np.float64)
    _MODULE.launch("find_largest", _parts(table, _SEARCHED_PART), table.device, table.count, found)
    magnitude = float(found.get()[0])
    return magnitude if math.isfinite(magnitude) else math.inf
