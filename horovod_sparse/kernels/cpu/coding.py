"""Compact encodings of indices and of values (as logarithmic levels); docs/wire.md specifies both."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.formats import check_own
from horovod_sparse.kernels.types import Array, Indices


def encode_indices(indices: Indices) -> tuple[int, NDArray[np.uint8]]:
    """Encode the gaps between ascending indices as a Rice code (Rice and Plaunt 1971) in two streams.

    As in the code of Elias and Fano, one stream holds the low bits of all gaps and the other their high bits in unary,
    so that neither is read bit by bit. Random positions take about 0.4 % more than their entropy.

    Args:
        indices: int32, ascending and unique.

    Returns:
        The number of low bits, 0 .. 24, chosen from a sample of the gaps; the code, uint8, a multiple of 8 bytes. The
        code does not contain the first index.
    """
    return _cpu.encode_indices(indices)


def decode_indices(coded: NDArray[np.uint8], count: int, first: int, bits: int, end: int) -> Indices:
    """Decode the output of ``encode_indices``.

    Args:
        coded: The code, uint8.
        count: Number of indices, at least 1.
        first: The first index.
        bits: Number of low bits.
        end: Exclusive upper bound of the indices.

    Returns:
        The indices, ascending and unique, int32 [count].

    Raises:
        ValueError: The bytes are not a code of such indices.
    """
    return _cpu.decode_indices(coded, count, first, bits, end)


def check_ascending(parts: Sequence[Indices], end: int) -> None:
    """Raise ValueError unless the int32 indices of each part ascend in [0, end) without repeats."""
    for indices in parts:
        _cpu.check_ascending(indices, end)


def key_range(values: Array) -> tuple[int, int]:
    """Return the smallest and the largest magnitude among the finite nonzero values.

    Args:
        values: float32 or float64, contiguous.

    Returns:
        Both as the bits of a float32, to which float64 magnitudes are rounded; (0, 0) if there are no such values.
    """
    return _cpu.key_range(values)


def round_levels(values: Array, bits: int, top: int, shift: int) -> tuple[Array, Array]:
    """Split values into their nearest levels and the rounding errors, which sum exactly to the values.

    With ``L = 2**(bits - 1) - 1``, the magnitudes of the levels are 0 and, for i = 1 .. L, the float32 numbers whose
    bits are ``top - (L - i) * 2**shift`` (0 where that is negative). This is a piecewise linear logarithm with equal
    steps inside an octave. Every level has 23 - shift bits after the leading one. Values below half of the lowest level
    become 0; values above the largest level become that level. If the error itself would have to be rounded, the level
    is 0 and the error is the value. Infinity and NaN are unchanged and have error 0.

    Args:
        values: float32 or float64, contiguous.
        bits: Bits per code, 4 or 8.
        top: Bits of the largest level, a finite float32; a multiple of ``2**shift``.
        shift: 16 .. 23; the bits of adjacent levels differ by ``2**shift``.

    Returns:
        The levels and the errors, both in the dtype of the values.
    """
    return _cpu.round_levels(values, bits, top, shift)


def encode_levels(values: Array, bits: int, top: int, shift: int) -> NDArray[np.uint8]:
    """Encode values rounded by ``round_levels``, with the same arguments.

    Returns:
        Codes, uint8: the index of the level, plus ``L + 1`` for negative values; ``L + 1`` alone for infinity and NaN.
        Codes of 4 bits are packed two per byte, the first in the lower half; an unused upper half is 0.
    """
    return _cpu.encode_levels(values, bits, top, shift)


def decode_levels(codes: NDArray[np.uint8], count: int, bits: int, top: int, shift: int, dtype: np.dtype[Any]) -> Array:
    """Decode the output of ``encode_levels``; infinity and NaN both become NaN.

    Args:
        codes: Output of ``encode_levels``.
        count: Number of values.
        bits: Bits per code, 4 or 8.
        top: See ``round_levels``.
        shift: See ``round_levels``.
        dtype: Dtype of the result, float32 or float64.
    """
    return _cpu.decode_levels(codes, count, bits, top, shift, check_own(dtype))
