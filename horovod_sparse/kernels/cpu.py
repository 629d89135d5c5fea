"""Kernels for NumPy arrays: SIMD loops in C++ (csrc/cpu) that run without the GIL; ``kernels.protocol`` documents them.

bfloat16 is that of ml_dtypes. Conversions are NumPy's, which is fast enough.
"""

# ruff: noqa: D103

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.formats import check_own, format_of
from horovod_sparse.kernels.formats import largest as largest_of
from horovod_sparse.kernels.protocol import Kernels
from horovod_sparse.kernels.scratch import SCRATCH
from horovod_sparse.kernels.types import Array, Indices, Moments, Segments

try:
    import horovod_sparse.kernels._cpu as _cpu
except ModuleNotFoundError as error:
    raise ImportError(
        f"the C++ module of {Path(__file__).parents[1]} was not built: if this is a checkout, and horovod_sparse is "
        "installed elsewhere, start Python in another folder, or with `python -P`; to use the checkout, "
        "`pip install --editable .` builds it",
        name=error.name,
    ) from error

_typed = cast(Kernels, _cpu)
accumulate = _typed.accumulate
add = _typed.add
block_scores = _typed.block_scores
check_ascending = _typed.check_ascending
count_magnitudes = _typed.count_magnitudes
count_reaching = _typed.count_reaching
cut = _typed.cut
decode_indices = _typed.decode_indices
decode_levels = _typed.decode_levels
dequantize = _typed.dequantize
encode_indices = _typed.encode_indices
encode_levels = _typed.encode_levels
exclude = _typed.exclude
gathered = _typed.gathered
key_range = _typed.key_range
largest = _typed.largest
merge_sum = _typed.merge_sum
quantize = _typed.quantize
reaching = _typed.reaching
round_levels = _typed.round_levels
sample = _typed.sample
scatter = _typed.scatter
select = _typed.select
select_above = _typed.select_above
sketch_length = _typed.sketch_length
sketch_query = _typed.sketch_query
sketch_update = _typed.sketch_update
square_norm = _typed.square_norm
tail = _typed.tail
take = _typed.take


def accumulate_moments(gradients: Segments, buffer: Array, scale: float = 1.0, threads: int = 1) -> Moments:
    return Moments(*_cpu.accumulate_moments(gradients, buffer, scale, threads))


def places(indices: Indices, cuts: NDArray[np.int32]) -> NDArray[np.int64]:
    if _flat(indices, "indices").dtype != np.int32:
        raise ValueError(f"indices: dtype {indices.dtype} is not int32")
    return np.searchsorted(indices, cuts).astype(np.int64)


def shifted(indices: Indices, by: int) -> Indices:
    if _flat(indices, "indices").dtype != np.int32:
        raise ValueError(f"indices: dtype {indices.dtype} is not int32")
    found: Indices = indices + np.int32(by)
    return found


def narrow(values: Array, name: str, out: Array | None = None) -> Array:
    format_ = format_of(name, check_own(_flat(values, "values").dtype))
    if out is None:
        if format_ == values.dtype:
            return values.view(np.uint8)
        out = SCRATCH.empty(values.size * format_.itemsize, values, np.uint8)
    target = _viewed(out, "out", format_)
    if target.size != values.size:
        needed = values.size * format_.itemsize
        raise ValueError(f"out: has {out.size} bytes, but {values.size} values in {name} need {needed}")
    if _has_kernel(values.dtype, format_):
        _cpu.narrow(values, target.view(np.uint16), name == "bfloat16")
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(target, values, casting="unsafe")
    return out


def widen(message: Array, name: str, dtype: np.dtype[Any]) -> Array:
    format_ = format_of(name, check_own(dtype))
    stored = _viewed(message, "message", format_)
    if _has_kernel(dtype, format_):
        values = SCRATCH.empty(stored.size, message, dtype)
        _cpu.widen(stored.view(np.uint16), values, name == "bfloat16")
        return values
    with np.errstate(invalid="ignore"):  # NaNs with any payload
        return stored.astype(dtype, copy=False)


def round_values(values: Array, name: str) -> tuple[Array, Array]:
    format_ = format_of(name, check_own(_flat(values, "values").dtype))
    if format_ == values.dtype:
        return values, np.zeros_like(values)
    if _has_kernel(values.dtype, format_):
        rounded, error = SCRATCH.empty(values.size, values), SCRATCH.empty(values.size, values)
        _cpu.round_values(values, rounded, error, name == "bfloat16")
        return rounded, error
    limit = largest_of(format_)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        rounded = np.clip(values, -limit, limit).astype(format_).astype(values.dtype)
        error = values - rounded
        inexact = np.flatnonzero(values - error != rounded)
    rounded[inexact] = np.where(np.isfinite(values[inexact]), 0, values[inexact])
    error[inexact] = np.where(np.isfinite(values[inexact]), values[inexact], 0)
    return rounded, error


def _has_kernel(own: np.dtype[Any], format_: np.dtype[Any]) -> bool:
    """Return whether a conversion is written in C++; NumPy rounds float64 once, to any format."""
    return own == np.float32 and format_.itemsize == 2


def _flat(array: Any, name: str) -> Array:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: expected a NumPy array, not {type(array)}")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, not {array.ndim}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: must be contiguous")
    return array


def _viewed(message: Array, what: str, format_: np.dtype[Any]) -> Array:
    """Return a view of a message in the dtype of its format."""
    if _flat(message, what).dtype != np.uint8:
        raise ValueError(f"{what}: dtype {message.dtype} is not uint8")
    if message.size % format_.itemsize:
        raise ValueError(f"{what}: {message.size} bytes are not a whole number of values of {format_.itemsize} bytes")
    stored = message.view(format_)
    if not stored.flags.aligned:
        raise ValueError(f"{what}: must be aligned to values of {format_.itemsize} bytes")
    return stored


def simd_level() -> str:
    """Return the instruction set in use: "avx512", "avx2" or "portable"."""
    level: str = _cpu.simd_level()
    return level


def use_simd(level: str | None) -> None:
    """Set the instruction set of the whole process; None selects the best that this machine supports.

    The environment variable HOROVOD_SPARSE_SIMD sets the initial level. Results do not depend on the level.

    Raises:
        ValueError: The level is unknown, or this machine does not support it.
    """
    _cpu.use_simd(level or "")


use_simd(os.environ.get("HOROVOD_SPARSE_SIMD"))
