"""Sparse vectors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.types import Array, Indices, Segments


def add(indices: Indices | None, values: Array, buffer: Array) -> None:
    """Set ``buffer[indices] += values``.

    Args:
        indices: Unique positions in the buffer; None: all positions.
        values: Values in the buffer's dtype, one per index.
        buffer: Modified in place, float32 or float64 [n].
    """
    _cpu.add(indices, values, buffer)


def scatter(
    indices: Indices | None, values: Array, outputs: Segments, scale: float = 1.0, *, cleared: bool = False
) -> None:
    """Fill the outputs with zeros and write ``values * scale`` at the indices.

    Indices that no output covers are ignored. The product is rounded to the dtype of the values, then to that of the
    output (to nearest even; from float64 to 16 bits via float32).

    Args:
        indices: Ascending and unique; None: all positions.
        values: float32 or float64, one per index.
        outputs: Contiguous, writable segments of any dtype.
        scale: Factor, rounded to the dtype of the values.
        cleared: Whether the outputs already hold zeros, so that only the entries are written.
    """
    _cpu.scatter(indices, values, outputs, scale, cleared)


def exclude(indices: Indices, values: Array, others: Indices) -> tuple[Indices, Array]:
    """Return a sparse vector without its entries at given indices, in time linear in both.

    Args:
        indices: Ascending and unique, int32.
        values: float32 or float64, one per index.
        others: Indices to remove, ascending and unique, int32; they need not occur in the vector.

    Returns:
        indices: Remaining indices, ascending.
        values: Values at the remaining indices.
    """
    return _cpu.exclude(indices, values, others)


def merge_sum(vectors: Sequence[tuple[Indices, Array]], size: int) -> tuple[Indices, Array]:
    """Sum sparse vectors, in time linear in their entries.

    Values at the same index are added in the order of the vectors, ``((v0 + v1) + v2)``, so the bits of the sum depend
    on nothing else. Entries whose sum is zero remain.

    Args:
        vectors: At least one (indices, values); indices ascending and unique in [0, size), all values of one dtype.
        size: Number of positions of the bucket, less than 2**31.

    Returns:
        indices: Union of the indices, ascending.
        values: The sums, in the dtype of the vectors' values.
    """
    return _cpu.merge_sum(vectors, size)


def count_magnitudes(values: Array, prefix: int, shift: int, bits: int) -> NDArray[np.int64]:
    """Return the histogram of one digit of the magnitudes: a step of radix selection, summable over ranks.

    The key of x is the bits of its absolute value, ``abs(x).view(int32)`` (31 bits) or ``.view(int64)`` (63 bits). Keys
    are ordered like magnitudes. The digit of a key is the `bits` bits above its lowest `shift` bits.

    Args:
        values: float32 or float64 [n], contiguous.
        prefix: Key whose bits above the digit select the keys to count; its other bits do not matter.
        shift: Number of bits below the digit.
        bits: Number of bits of the digit, 1 .. 16.

    Returns:
        The number of selected keys with each digit, int64 [2**bits].
    """
    return _cpu.count_magnitudes(values, prefix, shift, bits)
