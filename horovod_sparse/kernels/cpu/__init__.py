"""Kernels for NumPy arrays: SIMD loops in C++ (csrc/cpu) that run without the GIL.

A bucket is a flat range of positions. Its gradients are *segments*: pairs (start, array) whose flat array covers the
positions [start, start + len(array)). Segments ascend and do not overlap. Positions that no segment covers are *held*:
their parameters are inactive in this step. A bucket's *buffer* is one contiguous array over all of its positions.

Gradients and outputs are float32, float16, bfloat16 (from ml_dtypes) or float64. Buffers and the values of sparse
vectors are float32 or float64. Indices are int32. Arithmetic uses the buffer's dtype. Before anything is written, every
function raises ValueError for unsuitable arrays (dtype, shape, contiguity, bounds, 2**31 or more positions) and
TypeError for objects that are not NumPy arrays.
"""

import os

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.cpu.coding import (
    check_ascending,
    decode_indices,
    decode_levels,
    encode_indices,
    encode_levels,
    key_range,
    round_levels,
)
from horovod_sparse.kernels.cpu.convert import narrow, round_values, widen
from horovod_sparse.kernels.cpu.quantize import dequantize, quantize
from horovod_sparse.kernels.cpu.select import accumulate, cut, select, select_above, take
from horovod_sparse.kernels.cpu.sketch import sketch_length, sketch_query, sketch_update
from horovod_sparse.kernels.cpu.statistics import (
    accumulate_moments,
    block_scores,
    count_reaching,
    largest,
    sample,
    square_norm,
)
from horovod_sparse.kernels.cpu.vectors import add, count_magnitudes, exclude, merge_sum, scatter

__all__ = [
    "accumulate",
    "accumulate_moments",
    "add",
    "block_scores",
    "check_ascending",
    "count_magnitudes",
    "count_reaching",
    "cut",
    "decode_indices",
    "decode_levels",
    "dequantize",
    "encode_indices",
    "encode_levels",
    "exclude",
    "key_range",
    "largest",
    "merge_sum",
    "narrow",
    "quantize",
    "round_levels",
    "round_values",
    "sample",
    "scatter",
    "select",
    "select_above",
    "simd_level",
    "sketch_length",
    "sketch_query",
    "sketch_update",
    "square_norm",
    "take",
    "use_simd",
    "widen",
]


def simd_level() -> str:
    """Return the name of the instruction set in use: "avx512", "avx2" or "portable"."""
    return _cpu.simd_level()


def use_simd(level: str | None) -> None:
    """Set the instruction set of the whole process; None selects the best that this machine supports.

    The environment variable HOROVOD_SPARSE_SIMD sets the initial level. Results do not depend on the level.

    Raises:
        ValueError: The level is unknown, or this machine does not support it.
    """
    _cpu.use_simd(level or "")


use_simd(os.environ.get("HOROVOD_SPARSE_SIMD"))
