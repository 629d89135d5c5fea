"""Codes of indices, and of values as logarithmic levels; docs/wire.md describes both."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.formats import check_own
from horovod_sparse.kernels.types import Array, Indices


def encode_indices(indices: Indices) -> tuple[int, NDArray[np.uint8]]:
    """Write the gaps between ascending indices in few bits: a Rice code (Rice and Plaunt 1971), its two parts apart.

    As in the code of Elias and Fano, the low bits of all gaps are together, and what is above them is together in
    unary, so that neither is read bit by bit. Positions at random cost about 0.4 % more than their entropy.

    Args:
        indices: Ascending and unique, int32.

    Returns:
        The number of low bits, 0 .. 24, chosen from a sample of the gaps; the code, uint8, a multiple of 8 bytes. The
        first index is not in it.
    """
    return _cpu.encode_indices(indices)


def decode_indices(coded: NDArray[np.uint8], count: int, first: int, bits: int, end: int) -> Indices:
    """Read indices that encode_indices wrote.

    Args:
        coded: The code.
        count: How many indices, at least 1.
        first: The first of them.
        bits: The number of low bits.
        end: All indices must be below it.

    Returns:
        The indices, ascending and unique, int32 [count].

    Raises:
        ValueError: The bytes are no code of such indices.
    """
    return _cpu.decode_indices(coded, count, first, bits, end)


def check_ascending(parts: Sequence[Indices], end: int) -> None:
    """Raise ValueError unless the indices of each part (int32) ascend without repeats in 0 .. end."""
    for indices in parts:
        _cpu.check_ascending(indices, end)


def key_range(values: Array) -> tuple[int, int]:
    """Find the least and the largest magnitude of what is neither zero nor infinite nor NaN.

    Args:
        values: float32 or float64, contiguous.

    Returns:
        Both as the bits of a float32, to which those of float64 are rounded; (0, 0) where there is nothing.
    """
    return _cpu.key_range(values)


def round_levels(values: Array, bits: int, top: int, shift: int) -> tuple[Array, Array]:
    """Part values into their nearest levels and the rounding errors; their sums are exactly the values.

    With ``L = 2**(bits - 1) - 1``, the magnitudes of the levels are 0 and those whose bits as a float32 are
    ``top - (L - i) * 2**shift`` for i = 1 .. L (0 where that is negative): a piecewise linear logarithm, with equal
    steps inside an octave. All levels are float32 numbers with 23 - shift bits behind the leading one. Values below
    half of the lowest level become 0, those above the largest become it. Of those whose error would have to be rounded,
    all is error. Infinity and NaN are as they are, without an error.

    Args:
        values: float32 or float64, contiguous.
        bits: Of a code, 4 or 8.
        top: The bits of the largest level, a finite float32; a multiple of ``2**shift``.
        shift: 16 .. 23; between two levels are ``2**shift`` of the bits.

    Returns:
        The levels and the errors, both in the dtype of the values.
    """
    return _cpu.round_levels(values, bits, top, shift)


def encode_levels(values: Array, bits: int, top: int, shift: int) -> NDArray[np.uint8]:
    """Write values that round_levels has been at, with the same arguments.

    Returns:
        Codes, uint8: the number of the level, plus ``L + 1`` where the value is negative; ``L + 1`` alone for what is
        not finite. With 4 bits two per byte, the first in the lower half; the last upper half is 0.
    """
    return _cpu.encode_levels(values, bits, top, shift)


def decode_levels(codes: NDArray[np.uint8], count: int, bits: int, top: int, shift: int, dtype: np.dtype[Any]) -> Array:
    """Read what encode_levels wrote; what was not finite is NaN.

    Args:
        codes: From encode_levels.
        count: How many values.
        bits: As for encode_levels.
        top: As for encode_levels.
        shift: As for encode_levels.
        dtype: Of the values, float32 or float64.
    """
    return _cpu.decode_levels(codes, count, bits, top, shift, check_own(dtype))
