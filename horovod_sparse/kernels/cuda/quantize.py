"""Stochastic quantization on the device; kernels.protocol documents it. Nothing synchronizes."""

from __future__ import annotations

import cupy
import numpy as np

from horovod_sparse.kernels.cuda.launch import (
    Module,
    blocks_for,
    check_dtype,
    check_real,
    check_scale,
    check_seed,
    instances,
    real_of,
)
from horovod_sparse.kernels.types import Array

_BITS = (4, 8, 16)
_MODULE = Module("quantize", plain=instances(("quantize", "dequantize"), _BITS))
_BLOCK = 256  # elements with a common unit
_BLOCKS_AT_ONCE = 8


def quantize(buffer: Array, bits: int, seed: int) -> tuple[Array, Array]:
    """Implement ``cpu.quantize``; does not synchronize."""
    check_real(buffer, "buffer")
    codes = cupy.empty(_code_count(buffer.size, bits), _code_dtype(bits))
    units = cupy.empty(blocks_for(buffer.size, _BLOCK), np.float32)
    _MODULE.launch(
        f"quantize<{real_of(buffer)}, {bits}>",
        blocks_for(units.size, _BLOCKS_AT_ONCE),
        *(buffer, np.int64(buffer.size), check_seed(seed), codes, units),
    )
    return codes, units


def dequantize(codes: Array, units: Array, buffer: Array, bits: int, scale: float = 1.0, *, add: bool = False) -> None:
    """Implement ``cpu.dequantize``; does not synchronize."""
    check_real(buffer, "buffer")
    _check_part(codes, _code_count(buffer.size, bits), _code_dtype(bits), "codes")
    _check_part(units, blocks_for(buffer.size, _BLOCK), np.float32, "units")
    _MODULE.launch(
        f"dequantize<{real_of(buffer)}, {bits}>",
        blocks_for(units.size, _BLOCKS_AT_ONCE),
        *(codes, units, np.int64(buffer.size), check_scale(scale, buffer), np.int32(add), buffer),
    )


def _code_count(size: int, bits: int) -> int:
    if bits not in _BITS:
        raise ValueError(f"bits must be 4, 8 or 16, not {bits}")
    return blocks_for(size, 2) if bits == 4 else size


def _code_dtype(bits: int) -> type[np.generic]:
    return np.uint16 if bits == 16 else np.uint8


def _check_part(array: Array, length: int, dtype: type[np.generic], name: str) -> None:
    """Raise an error unless the array can be a result of ``quantize``."""
    if check_dtype(array, name, dtype).size != length:
        raise ValueError(f"{name}: has {array.size} elements, but the buffer needs {length}")
