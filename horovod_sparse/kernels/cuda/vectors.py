"""Sparse vectors on the device; kernels.protocol documents the functions.

The CPU kernels reject indices that are out of bounds or do not ascend. That check would have to synchronize here.
Instead, entries outside of the bucket are ignored, and the result of indices that do not ascend, or repeat, is
undefined. Memory outside of the arrays is never read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import copied, to_host
from horovod_sparse.kernels.cuda.launch import (
    Module,
    Table,
    address,
    blocks_for,
    check_dtype,
    check_real,
    check_scale,
    check_size,
    check_vector,
    multiprocessors,
    real_of,
    upload,
    zeros,
)
from horovod_sparse.kernels.types import MAX_SIZE, Array, Indices, Segments

_MODULE = Module(
    "vectors",
    templates=["add", "gather", "scatter", "fill", "exclude", "reaching", "merge", "count"],
    plain=["clear", "bounds", "places", "shift"],
)

_ELEMENTS = 1024  # per block
_PART = 4096  # active positions of the outputs that a block writes
_STATE_BYTES = 64  # state shared by the blocks of a kernel, before the tiles' statuses
_VECTOR = np.dtype([("indices", np.uint64), ("values", np.uint64), ("count", np.int64)])
# Bits of a position inside a tile of merge_sum. The bitmap of the widest tile takes 4 KiB of shared memory.
_NARROWEST, _WIDEST = 10, 15
_PER_TILE = 256  # mean number of entries of a vector in a tile: one per thread
_MOST_BITS = 16
_BLOCKS_PER_PROCESSOR = 8


def add(indices: Indices | None, values: Array, buffer: Array) -> None:
    """Implement ``cpu.add``; entries outside of the buffer are ignored. Does not synchronize."""
    check_real(buffer, "buffer")
    indices, values = _check_sparse(indices, values)
    check_dtype(values, "vector: values", buffer.dtype)
    if indices is None and values.size != buffer.size:
        raise ValueError(f"vector: {values.size} values for all of {buffer.size} positions")
    blocks = blocks_for(values.size, _ELEMENTS)
    count, size = np.array([values.size, buffer.size], np.int64)
    _MODULE.launch(f"add<{real_of(values)}>", blocks, indices, values, count, buffer, size)


def scatter(
    indices: Indices | None, values: Array, outputs: Segments, scale: float = 1.0, *, cleared: bool = False
) -> None:
    """Implement ``cpu.scatter``, with bfloat16 outputs as their bits (uint16); does not synchronize."""
    indices, values = _check_sparse(indices, values)
    table = Table(outputs, values.size if indices is None else MAX_SIZE, writable=True)
    with np.errstate(over="ignore"):
        factor = values.dtype.type(scale)
    segments = table.device, table.count
    parts, active = blocks_for(table.active, _PART), np.int64(table.active)
    if indices is None:
        _MODULE.launch(f"fill<{real_of(values)}>", parts, *segments, active, values, factor)
    elif parts > 0:
        if not cleared:
            _MODULE.launch("clear", parts, *segments, active)
        blocks, count = blocks_for(values.size, _ELEMENTS), np.int64(values.size)
        _MODULE.launch(f"scatter<{real_of(values)}>", blocks, *segments, indices, values, count, factor)


def exclude(indices: Indices, values: Array, others: Indices) -> tuple[Indices, Array]:
    """Implement ``cpu.exclude``; synchronizes once, for the number of remaining entries."""
    check_vector(indices, values, "vector")
    check_dtype(others, "others")
    if not indices.size or not others.size:
        return copied(indices), copied(values)
    tiles = blocks_for(indices.size, _ELEMENTS)
    state, statuses, _ = _scratch(tiles)
    kept = cupy.empty(indices.size, np.int32), cupy.empty(indices.size, values.dtype)
    count, other_count = np.array([indices.size, others.size], np.int64)
    _MODULE.launch(
        f"exclude<{real_of(values)}>", tiles, indices, values, count, others, other_count, state, statuses, *kept
    )
    return _first(_number(state), *kept)


def shifted(indices: Indices, by: int) -> Indices:
    """Implement ``cpu.shifted``; does not synchronize."""
    count = check_dtype(indices, "indices").size
    found: Indices = cupy.empty(count, np.int32)
    _MODULE.launch("shift", blocks_for(count), indices, np.int64(count), np.int32(by), found)
    return found


def gathered(buffer: Array, positions: Indices, factor: float) -> Array:
    """Implement ``cpu.gathered``; does not synchronize, so positions are not checked: out of bounds returns 0."""
    count = check_dtype(positions, "positions").size
    size, real = np.int64(check_real(buffer, "buffer").size), real_of(buffer)
    values: Array = cupy.empty(count, buffer.dtype)
    given = buffer, size, positions, np.int64(count), check_scale(factor, buffer, "factor")
    _MODULE.launch(f"gather<{real}>", blocks_for(count), *given, values)
    return values


def places(indices: Indices, cuts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Implement ``cpu.places``; synchronizes once, for the result."""
    count = check_dtype(indices, "indices").size
    found = cupy.empty(cuts.size, np.int64)
    given = upload(np.ascontiguousarray(cuts, np.int32).view(np.uint8))
    _MODULE.launch("places", blocks_for(cuts.size), indices, np.int64(count), given, np.int64(cuts.size), found)
    return to_host(found)


def reaching(indices: Indices, values: Array, threshold: float) -> tuple[Indices, Array]:
    """Implement ``cpu.reaching``; synchronizes once, for the number of entries."""
    check_vector(indices, values, "vector")
    if not threshold >= 0:
        raise ValueError(f"threshold must be 0 or more, not {threshold}")
    tiles = blocks_for(indices.size, _ELEMENTS)
    state, statuses, _ = _scratch(tiles)
    kept = cupy.empty(indices.size, np.int32), cupy.empty(indices.size, values.dtype)
    count, least = np.int64(indices.size), values.dtype.type(threshold)
    _MODULE.launch(f"reaching<{real_of(values)}>", tiles, indices, values, count, least, state, statuses, *kept)
    return _first(_number(state), *kept)


def merge_sum(vectors: Sequence[tuple[Indices, Array]], size: int) -> tuple[Indices, Array]:
    """Implement ``cpu.merge_sum``; synchronizes once, for the number of sums, if two or more vectors have entries.

    If several NaNs are added at one position, the first one remains, with its payload.
    """
    checked = _check_vectors(vectors, size)
    filled = [(indices, values) for indices, values in checked if indices.size]
    if len(filled) <= 1:
        indices, values = (filled or checked)[0]
        return copied(indices), copied(values)
    merge = _Merge.of(sum(indices.size for indices, _ in filled), len(filled), size)
    rows = [(address(indices), address(values), indices.size) for indices, values in filled]
    table = upload(np.array(rows, _VECTOR).view(np.uint8))
    state, statuses, starts = _scratch(merge.tiles, 4 * merge.starts)
    sums = cupy.empty(merge.capacity, np.int32), cupy.empty(merge.capacity, filled[0][1].dtype)
    count, width, tiles = np.array([len(filled), merge.width, merge.tiles], np.int32)
    what = table, count, np.uint32(size), width, tiles, starts, state
    _MODULE.launch("bounds", blocks_for(merge.starts), *what)
    blocks = min(merge.tiles, _BLOCKS_PER_PROCESSOR * multiprocessors())
    _MODULE.launch(f"merge<{real_of(sums[1])}>", blocks, *what, statuses, *sums)
    return _first(_number(state), *sums)


def count_magnitudes(values: Array, prefix: int, shift: int, bits: int) -> NDArray[np.int64]:
    """Implement ``cpu.count_magnitudes``; synchronizes once, to return the counts on the host."""
    width = 8 * check_real(values, "values").itemsize - 1
    if not 1 <= bits <= _MOST_BITS:
        raise ValueError(f"bits must be 1 .. {_MOST_BITS}, not {bits}")
    if not 0 <= shift <= width - bits:
        raise ValueError(f"shift must be 0 .. {width - bits} for {bits} of {width} bits, not {shift}")
    if not 0 <= prefix < 1 << width:
        raise ValueError(f"prefix must have at most {width} bits, but is {prefix}")
    counts = zeros(1 << bits, np.uint32)
    blocks = min(blocks_for(values.size, _ELEMENTS), _BLOCKS_PER_PROCESSOR * multiprocessors())
    digit = np.array([prefix], f"i{values.itemsize}")[0], np.int32(shift), np.int32(bits)
    _MODULE.launch(f"count<{real_of(values)}>", blocks, values, np.int64(values.size), *digit, counts)
    return to_host(counts).astype(np.int64)


@dataclass(frozen=True)
class _Merge:
    """Partition of the bucket into tiles for ``merge_sum``.

    Attributes:
        width: Number of bits of a position inside a tile.
        tiles: Number of tiles of the bucket.
        starts: Number of offsets that mark the tiles in the vectors.
        capacity: Maximum number of sums.
    """

    width: int
    tiles: int
    starts: int
    capacity: int

    @classmethod
    def of(cls, entries: int, vectors: int, size: int) -> _Merge:
        """Return the partition for vectors with a total number of entries, in a bucket of ``size`` positions."""
        positions = max(1, _PER_TILE * vectors * size // entries)
        width = min(max(positions.bit_length() - 1, _NARROWEST), _WIDEST)
        tiles = blocks_for(size, 1 << width)
        return cls(width, tiles, (tiles + 1) * vectors, min(entries, size))


def _check_sparse(indices: Indices | None, values: Array) -> tuple[Indices | None, Array]:
    if indices is None:
        return None, check_real(values, "vector: values")
    return check_vector(indices, values, "vector")


def _check_vectors(vectors: Sequence[Any], size: int) -> list[tuple[Indices, Array]]:
    check_size(size)
    checked: list[tuple[Indices, Array]] = []
    for number, pair in enumerate(vectors):
        name = f"vector {number}"
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"{name}: expected (indices, values), not {pair}")
        checked.append(check_vector(*pair, name))
        check_dtype(pair[1], f"{name}: values", checked[0][1].dtype)
    if not checked:
        raise ValueError("merge_sum needs at least one vector: the dtype of the sum is that of the first")
    return checked


def _scratch(tiles: int, more: int = 0) -> tuple[Array, Array, Array]:
    """Return a zeroed kernel state (a count first), zeroed tile statuses, and ``more`` uninitialized bytes."""
    zeroed = _STATE_BYTES + 8 * tiles
    scratch: Array = cupy.empty(zeroed + more, np.uint8)
    scratch.data.memset_async(0, zeroed)  # type: ignore[attr-defined]  # CuPy only
    return scratch[:_STATE_BYTES], scratch[_STATE_BYTES:zeroed], scratch[zeroed:]


def _number(state: Array) -> int:
    """Return the count in a kernel's state; synchronizes."""
    return int(state[:8].view(np.int64)[0])


def _first(count: int, indices: Array, values: Array) -> tuple[Indices, Array]:
    """Return the first entries of the allocated arrays, copied if they use less than half of the memory."""
    indices, values, few = indices[:count], values[:count], 2 * count < indices.size
    return (copied(indices), copied(values)) if few else (indices, values)
