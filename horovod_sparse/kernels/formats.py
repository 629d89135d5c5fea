"""Wire formats of values; the same for every device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

FORMATS = {np.dtype(kind).name: np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}


def format_of(name: str, own: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a format.

    Args:
        name: "float64", "float32", "float16" or "bfloat16".
        own: Dtype of the values, at least as wide as the format.

    Raises:
        ValueError: The format is unknown, or wider than the values.
    """
    if name not in tuple(FORMATS):
        raise ValueError(f"unknown format {name!r}; known are: {', '.join(FORMATS)}")
    if FORMATS[name].itemsize > own.itemsize:
        raise ValueError(f"format {name} is wider than values of {own}")
    return FORMATS[name]


def check_own(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a vector's values; raise ValueError unless it is float32 or float64."""
    if dtype not in (np.float32, np.float64):
        raise ValueError(f"values: dtype {dtype} is neither float32 nor float64")
    return np.dtype(dtype)


def largest(format_: np.dtype[Any]) -> float:
    """Return the largest finite number of a format."""
    return float(ml_dtypes.finfo(format_).max)  # type: ignore[no-untyped-call]
