"""Conversion of values to wire formats and back, in NumPy, which is fast enough."""

from typing import Any

import numpy as np

from horovod_sparse.kernels.formats import check_own, format_of, largest
from horovod_sparse.kernels.types import Array


def narrow(values: Array, name: str, out: Array | None = None) -> Array:
    """Convert values to the bytes of a message, in a format that is at most as wide as their dtype.

    Values are rounded to nearest even (float64 to bfloat16 via float32); values beyond the format's range become
    infinite. Values rounded by ``round_values`` are converted exactly.

    Args:
        values: float32 or float64 [n], contiguous.
        name: Format: "float64", "float32", "float16" or "bfloat16".
        out: Output, uint8 [n * itemsize of the format], aligned to this itemsize. None: a new array, or a view of the
            values if the format is their dtype.

    Returns:
        The message, uint8.
    """
    format_ = format_of(name, check_own(_flat(values, "values").dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        if out is None:
            return values.astype(format_, copy=False).view(np.uint8)
        target = _viewed(out, "out", format_)
        if target.size != values.size:
            needed = values.size * format_.itemsize
            raise ValueError(f"out: has {out.size} bytes, but {values.size} values in {name} need {needed}")
        np.copyto(target, values, casting="unsafe")
    return out


def widen(message: Array, name: str, dtype: np.dtype[Any]) -> Array:
    """Convert a message back to values.

    Args:
        message: Output of ``narrow`` in the same format, aligned to the format's itemsize.
        name: Format of the message.
        dtype: Dtype of the result, float32 or float64; at least as wide as the format.

    Returns:
        The values; a view of the message if the format is ``dtype``.
    """
    stored = _viewed(message, "message", format_of(name, check_own(dtype)))
    with np.errstate(invalid="ignore"):  # NaNs with any payload
        return stored.astype(dtype, copy=False)


def round_values(values: Array, name: str) -> tuple[Array, Array]:
    """Split values into values that the format represents and the rounding errors, which sum exactly to the values.

    Values beyond the largest finite number of the format saturate at it. If the error itself would have to be rounded
    (float32 with float16: from about 2**29 on), the rounded value is 0 and the error is the value. Infinity and NaN are
    unchanged and have error 0.

    Args:
        values: float32 or float64 [n], contiguous.
        name: Format: "float64", "float32", "float16" or "bfloat16".

    Returns:
        The rounded values (the input itself if the format is its dtype) and the errors, both [n] in the dtype of the
        values.
    """
    format_ = format_of(name, check_own(_flat(values, "values").dtype))
    if format_ == values.dtype:
        return values, np.zeros_like(values)
    limit = largest(format_)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        rounded = np.clip(values, -limit, limit).astype(format_).astype(values.dtype)
        error = values - rounded
        inexact = np.flatnonzero(values - error != rounded)
    rounded[inexact] = np.where(np.isfinite(values[inexact]), 0, values[inexact])
    error[inexact] = np.where(np.isfinite(values[inexact]), values[inexact], 0)
    return rounded, error


def _flat(array: Array, name: str) -> Array:
    if not _is_numpy(array):
        raise TypeError(f"{name}: expected a NumPy array, not {type(array)}")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, not {array.ndim}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: must be contiguous")
    return array


def _is_numpy(array: object) -> bool:
    return isinstance(array, np.ndarray)


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
