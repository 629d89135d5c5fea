"""Conversion of values to wire formats and back on the device; kernels.protocol documents it."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from horovod_sparse.kernels.cuda.launch import Module, address, blocks_for, check_dtype, check_real, real_of
from horovod_sparse.kernels.formats import check_own, format_of, largest
from horovod_sparse.kernels.types import Array

_STORED = {"float32": "float", "float16": "hvs::Half", "bfloat16": "hvs::BFloat16"}
_PAIRS = [("float16", "float"), ("bfloat16", "float"), *((name, "double") for name in _STORED)]
_KERNELS = ("narrow_all", "widen_all", "round_all")
_INSTANCES = [f"{kernel}<{_STORED[name]}, {real}>" for kernel in _KERNELS for name, real in _PAIRS]
_MODULE = Module("convert", plain=_INSTANCES)
_ELEMENTS = 1024  # per block


def narrow(values: Array, name: str, out: Array | None = None) -> Array:
    """Implement ``cpu.narrow``; does not synchronize."""
    format_ = format_of(name, check_real(values, "values").dtype)
    if out is None and format_ == values.dtype:
        return values.view(np.uint8)
    nbytes = values.size * format_.itemsize
    message: Array = cupy.empty(nbytes, np.uint8) if out is None else _check_message(out, "out", format_)
    if message.size != nbytes:
        raise ValueError(f"out: has {message.size} bytes, but {values.size} values in {name} need {nbytes}")
    if format_ == values.dtype:
        message[...] = values.view(np.uint8)
    else:
        _launch("narrow_all", name, values, values, message, np.int64(values.size))
    return message


def widen(message: Array, name: str, dtype: np.dtype[Any]) -> Array:
    """Implement ``cpu.widen``; does not synchronize."""
    format_ = format_of(name, check_own(dtype))
    _check_message(message, "message", format_)
    if format_ == dtype:
        return message.view(dtype)
    values: Array = cupy.empty(message.size // format_.itemsize, dtype)
    _launch("widen_all", name, values, message, values, np.int64(values.size))
    return values


def round_values(values: Array, name: str) -> tuple[Array, Array]:
    """Implement ``cpu.round_values``; does not synchronize."""
    format_ = format_of(name, check_real(values, "values").dtype)
    if format_ == values.dtype:
        return values, cupy.zeros_like(values)
    rounded, error = cupy.empty_like(values), cupy.empty_like(values)
    limit = values.dtype.type(largest(format_))
    _launch("round_all", name, values, values, np.int64(values.size), limit, rounded, error)
    return rounded, error


def _launch(kernel: str, name: str, values: Array, *arguments: Any) -> None:
    blocks = blocks_for(values.size, _ELEMENTS)
    _MODULE.launch(f"{kernel}<{_STORED[name]}, {real_of(values)}>", blocks, *arguments)


def _check_message(message: Array, what: str, format_: np.dtype[Any]) -> Array:
    if check_dtype(message, what, np.uint8).size % format_.itemsize:
        raise ValueError(f"{what}: {message.size} bytes are not a whole number of values of {format_.itemsize} bytes")
    if message.size and address(message) % format_.itemsize:
        raise ValueError(f"{what}: must be aligned to values of {format_.itemsize} bytes")
    return message
