"""Values for the wire; NumPy is fast enough."""

from typing import Any

import numpy as np

from horovod_sparse.kernels.formats import check_own, format_of, largest
from horovod_sparse.kernels.types import Array


def narrow(values: Array, name: str, out: Array | None = None) -> Array:
    """Values as a message, in a format that is as wide as they are or narrower.

    They are rounded to nearest even, from float64 to bfloat16 by way of float32; what is too large becomes infinite.
    Values that ``round_values`` has been at stay what they are.

    Args:
        values: float32 or float64 [n], contiguous.
        name: Of the format: "float64", "float32", "float16" or "bfloat16".
        out: Where the message is written, uint8 [n * bytes of the format], aligned to these; None: a new array, or
            where the format is that of the values, a view of them.

    Returns:
        The message, uint8.
    """
    format_ = format_of(name, check_own(_flat(values, "values").dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        if out is None:
            return values.astype(format_, copy=False).view(np.uint8)
        room = _viewed(out, "out", format_)
        if room.size != values.size:
            raise ValueError(f"out: {out.size} bytes are not those of {values.size} values in {name}")
        np.copyto(room, values, casting="unsafe")
    return out


def widen(message: Array, name: str, dtype: np.dtype[Any]) -> Array:
    """The values of a message.

    Args:
        message: From narrow, with the same name; aligned to the format's bytes.
        name: As for narrow.
        dtype: Of the values, float32 or float64; as wide as the format or wider.

    Returns:
        The values; a view where they travelled in their own dtype.
    """
    stored = _viewed(message, "message", format_of(name, check_own(dtype)))
    with np.errstate(invalid="ignore"):  # NaN of any payload
        return stored.astype(dtype, copy=False)


def round_values(values: Array, name: str) -> tuple[Array, Array]:
    """Part values into what a message holds and the rounding error; their sum is exactly the values.

    Values beyond the format's largest saturate at it. The few for which even the error would have to be rounded, from
    some 2**29 on in float32 with float16, are all error. Infinity and NaN are as they are, without an error.

    Args:
        values: float32 or float64 [n], contiguous.
        name: As for narrow.

    Returns:
        The rounded values (those given, where the format is theirs) and the errors, both [n] in the dtype of the
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
    """The values of a message, as they are stored."""
    if _flat(message, what).dtype != np.uint8:
        raise ValueError(f"{what}: dtype {message.dtype} is not uint8")
    if message.size % format_.itemsize:
        raise ValueError(f"{what}: {message.size} bytes are no whole number of values of {format_.itemsize} bytes")
    stored = message.view(format_)
    if not stored.flags.aligned:
        raise ValueError(f"{what}: must be aligned to values of {format_.itemsize} bytes")
    return stored
