"""Count sketches on the device; kernels.protocol documents them. Nothing synchronizes."""

from __future__ import annotations

import math

import cupy
import numpy as np

from horovod_sparse.kernels.cuda.launch import (
    Module,
    blocks_for,
    check_dtype,
    check_real,
    check_scale,
    check_seed,
    check_size,
    instances,
    multiprocessors,
    real_of,
)
from horovod_sparse.kernels.types import Array, Indices

_ROWS = (1, 3, 5)
_MODULE = Module("sketch", plain=instances(("update", "query"), _ROWS))
_LANES, _SECTION_VECTORS = 16, 1024  # must match csrc/common/sketch.hpp
_PARTS_OF_QUERY = 4  # thread blocks per section
_COPIES_PER_PROCESSOR = 4


def sketch_length(size: int, ratio: float, rows: int) -> int:
    """Implement ``cpu.sketch_length``."""
    _check_rows(rows)
    check_size(size)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be above 0 and at most 1, not {ratio}")
    return _LANES * rows * max(_sections(size), int(ratio * size / (_LANES * rows)))


def sketch_update(sketch: Array, buffer: Array, delivered: Indices, rows: int, seed: int, carried: float = 0.0) -> None:
    """Implement ``cpu.sketch_update``; does not synchronize, so ``delivered`` is not checked to ascend."""
    groups = _check_sketch(sketch, buffer, rows)
    check_dtype(delivered, "delivered")
    key = check_seed(seed)
    if not math.isfinite(carried):
        raise ValueError(f"carried must be finite, not {carried}")
    sections = _sections(buffer.size)
    blocks, stride, copies = sections, 0, None
    if rows > 1 and carried != 0 and sections:
        blocks = min(sections, _COPIES_PER_PROCESSOR * multiprocessors())
        stride = _LANES * rows * -(-groups // sections)
        copies = cupy.empty(blocks * stride, sketch.dtype)
    _MODULE.launch(
        f"update<{real_of(sketch)}, {rows}>",
        blocks,
        *(sketch, np.uint64(buffer.size), np.uint64(groups), key, buffer, delivered, np.uint64(delivered.size)),
        *(sketch.dtype.type(carried), copies, np.uint64(stride)),
    )


def sketch_query(sketch: Array, buffer: Array, rows: int, seed: int, scale: float = 1.0, *, add: bool = False) -> None:
    """Implement ``cpu.sketch_query``; does not synchronize."""
    groups = _check_sketch(sketch, buffer, rows)
    key, factor = check_seed(seed), check_scale(scale, buffer)
    _MODULE.launch(
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
    """Return the number of groups of counters in a row of the sketch."""
    check_dtype(sketch, "sketch", check_real(buffer, "buffer").dtype)
    _check_rows(rows)
    groups, rest = divmod(sketch.size, _LANES * rows)
    sections = _sections(buffer.size)
    if rest or not sections <= groups <= max(sections, buffer.size // (_LANES * rows)):
        raise ValueError(
            f"sketch: {sketch.size} counters do not fit a bucket of {buffer.size} in {rows} rows; use sketch_length"
        )
    return groups
