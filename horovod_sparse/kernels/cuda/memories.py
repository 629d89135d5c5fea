"""Count sketches and stochastic quantization on the device; what they are is said in kernels.cpu. Nothing waits."""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

from horovod_sparse.kernels.cuda.launch import (
    Module,
    blocks_for,
    check_array,
    check_indices,
    check_real,
    check_same_dtype,
    check_scale,
    multiprocessors,
    real_of,
)
from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.place import MAX_SIZE

_ROWS, _BITS = (1, 3, 5), (4, 8)


def _instances(kernels: tuple[str, ...], options: tuple[int, ...]) -> list[str]:
    return [f"{kernel}<{real}, {one}>" for kernel in kernels for real in ("float", "double") for one in options]


_SKETCH = Module("sketch", plain=_instances(("update", "query"), _ROWS))
_QUANTIZE = Module("quantize", plain=_instances(("quantize", "dequantize"), _BITS))

_LANES, _SECTION_VECTORS = 16, 1024  # as csrc/common/sketch.hpp says it
_PARTS_OF_QUERY = 4  # blocks of threads that read a section
_COPIES_PER_PROCESSOR = 4
_BLOCK = 256  # elements that are quantized together
_BLOCKS_AT_ONCE = 8


# --- count sketch --------------------------------------------------------------------------------------------------


def sketch_length(size: int, ratio: float, rows: int) -> int:
    """As ``cpu.sketch_length``."""
    _check_rows(rows)
    if size < 0:
        raise ValueError(f"size must not be negative, but is {size}")
    if size > MAX_SIZE:
        raise ValueError(f"size: {size} elements, but indices are int32: use buckets of less than 2**31")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be above 0 and at most 1, not {ratio}")
    return _LANES * rows * max(_sections(size), int(ratio * size / (_LANES * rows)))


def sketch_update(sketch: Array, buffer: Array, delivered: Indices, rows: int, seed: int, carried: float = 0.0) -> None:
    """As ``cpu.sketch_update``, but that ``delivered`` ascends is not checked; nothing is waited for."""
    groups = _check_sketch(sketch, buffer, rows)
    check_indices(delivered, "delivered")
    key = _check_seed(seed)
    if not math.isfinite(carried):
        raise ValueError(f"carried must be finite, not {carried}")
    sections = _sections(buffer.size)
    blocks, room, copies = sections, 0, None
    if rows > 1 and carried != 0 and sections:
        blocks = min(sections, _COPIES_PER_PROCESSOR * multiprocessors())
        room = _LANES * rows * -(-groups // sections)
        copies = cupy.empty(blocks * room, sketch.dtype)
    _SKETCH.launch(
        f"update<{real_of(sketch)}, {rows}>",
        blocks,
        *(sketch, np.uint64(buffer.size), np.uint64(groups), key, buffer, delivered, np.uint64(delivered.size)),
        *(sketch.dtype.type(carried), copies, np.uint64(room)),
    )


def sketch_query(sketch: Array, buffer: Array, rows: int, seed: int, scale: float = 1.0, *, add: bool = False) -> None:
    """As ``cpu.sketch_query``; nothing is waited for."""
    groups = _check_sketch(sketch, buffer, rows)
    key, factor = _check_seed(seed), check_scale(scale, buffer)
    _SKETCH.launch(
        f"query<{real_of(sketch)}, {rows}>",
        _PARTS_OF_QUERY * _sections(buffer.size),
        *(sketch, np.uint64(buffer.size), np.uint64(groups), key, factor, np.int32(add), buffer),
    )


def _sections(size: int) -> int:
    return blocks_for(blocks_for(size, _LANES), _SECTION_VECTORS)


def _check_rows(rows: int) -> None:
    if rows not in _ROWS:
        raise ValueError(f"rows must be 1, 3 or 5, not {rows}")


def _check_sketch(sketch: Array, buffer: Array, rows: int) -> int:
    """The number of groups of counters that a row of the sketch has."""
    check_same_dtype(check_real(sketch, "sketch"), check_real(buffer, "buffer"), "sketch")
    _check_rows(rows)
    groups, rest = divmod(sketch.size, _LANES * rows)
    sections = _sections(buffer.size)
    if rest or not sections <= groups <= max(sections, buffer.size // (_LANES * rows)):
        raise ValueError(
            f"sketch: {sketch.size} counters do not fit a bucket of {buffer.size} in {rows} rows; use sketch_length"
        )
    return groups


def _check_seed(seed: int) -> Any:
    """A seed, as a kernel's argument."""
    if seed < 0:
        raise ValueError(f"seed must not be negative, but is {seed}")
    if seed >= 2**63:
        raise ValueError(f"seed must be less than 2**63, not {seed}")
    return np.uint64(seed)


# --- stochastic quantization ---------------------------------------------------------------------------------------


def quantize(buffer: Array, bits: int, seed: int) -> tuple[Array, Array]:
    """As ``cpu.quantize``; nothing is waited for."""
    check_real(buffer, "buffer")
    codes = cupy.empty(_code_bytes(buffer.size, bits), np.uint8)
    units = cupy.empty(blocks_for(buffer.size, _BLOCK), np.float32)
    _QUANTIZE.launch(
        f"quantize<{real_of(buffer)}, {bits}>",
        blocks_for(units.size, _BLOCKS_AT_ONCE),
        *(buffer, np.int64(buffer.size), _check_seed(seed), codes, units),
    )
    return codes, units


def dequantize(codes: Array, units: Array, buffer: Array, bits: int, scale: float = 1.0, *, add: bool = False) -> None:
    """As ``cpu.dequantize``; nothing is waited for."""
    check_real(buffer, "buffer")
    _check_part(codes, _code_bytes(buffer.size, bits), np.uint8, "codes")
    _check_part(units, blocks_for(buffer.size, _BLOCK), np.float32, "units")
    _QUANTIZE.launch(
        f"dequantize<{real_of(buffer)}, {bits}>",
        blocks_for(units.size, _BLOCKS_AT_ONCE),
        *(codes, units, np.int64(buffer.size), check_scale(scale, buffer), np.int32(add), buffer),
    )


def _code_bytes(size: int, bits: int) -> int:
    if bits not in _BITS:
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    return size if bits == 8 else blocks_for(size, 2)


def _check_part(array: Array, length: int, dtype: type[np.generic], name: str) -> None:
    """An array of quantize's result."""
    if check_array(array, name).dtype != dtype:
        raise ValueError(f"{name}: dtype {array.dtype} is not {np.dtype(dtype)}")
    if array.size != length:
        raise ValueError(f"{name}: has {array.size} elements, but the buffer needs {length}")
