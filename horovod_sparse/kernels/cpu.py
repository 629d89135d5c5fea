"""Kernels for NumPy arrays: SIMD loops in C++ (csrc/cpu) that run without the GIL.

A bucket is a flat range of positions. Its gradients are *segments*, pairs (start, array): the flat array covers the
positions start .. start + len(array). Segments ascend and do not overlap; positions between them are *held* (their
parameters take no part for now). A bucket's *buffer* is one contiguous array over all of its positions.

Gradients and outputs are float32, float16, bfloat16 (of ml_dtypes) or float64; buffers and the values of sparse
vectors are float32 or float64, indices are int32. The work is done in the buffer's dtype. Every function raises
ValueError for arrays that do not fit (dtype, shape, contiguity, bounds, 2**31 or more positions) and TypeError for
what is not a NumPy array, before anything is written.
"""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.types import Array, Indices, Segments


def accumulate(gradients: Segments, buffer: Array, scale: float = 1.0, threads: int = 1) -> None:
    """Set ``buffer <- scale * buffer``, plus the gradients inside their segments.

    Product and sum are rounded separately, like NumPy's. With scale 0 the buffer's old content does not count, even
    where it is NaN.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Changed in place, float32 or float64 [n].
        scale: Finite factor, rounded to the buffer's dtype.
        threads: How many threads share the work; the result does not depend on it.
    """
    _cpu.accumulate(gradients, buffer, scale, threads)


def select(gradients: Segments, buffer: Array, k: int, scale: float = 1.0, threads: int = 1) -> tuple[Indices, Array]:
    """Accumulate, then move the k largest magnitudes inside the segments out of the buffer, which keeps zeros.

    One pass over gradients and buffer: thresholds that are estimated from a sample settle most elements on the way,
    and the few that they leave open are ranked exactly. Where the sample misleads, radix selection follows, so that
    the result is exact for every input. Magnitudes are ordered by the bits of the absolute value: NaN above infinity
    above every number. Of equal magnitudes the lower position goes first.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Changed in place, float32 or float64 [n].
        k: How many elements leave; at most what the segments hold.
        scale: As for accumulate.
        threads: As for accumulate.

    Returns:
        indices: Positions that left, ascending and unique, int32 [min(k, positions inside the segments)].
        values: What they held, in the buffer's dtype.
    """
    return _cpu.select(gradients, buffer, k, scale, threads)


def select_above(
    gradients: Segments, buffer: Array, threshold: float, scale: float = 1.0, threads: int = 1
) -> tuple[Indices, Array]:
    """Accumulate, then move every magnitude of at least the threshold inside the segments out of the buffer.

    One pass over gradients and buffer, which keeps zeros where elements left. Magnitudes are ordered as for select:
    NaN leaves whatever the threshold. When the memory for what leaves runs out (MemoryError), nothing has left: the
    buffer holds the sum.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Changed in place, float32 or float64 [n].
        threshold: 0 or more, rounded to the buffer's dtype; 0 takes everything inside the segments.
        scale: As for accumulate.
        threads: As for accumulate.

    Returns:
        indices: Positions that left, ascending and unique, int32.
        values: What they held, in the buffer's dtype.
    """
    return _cpu.select_above(gradients, buffer, threshold, scale, threads)


def all_finite(gradients: Segments) -> bool:
    """Whether no element of any segment is infinite or NaN."""
    return _cpu.all_finite(gradients)


def merge_sum(vectors: Sequence[tuple[Indices, Array]], size: int) -> tuple[Indices, Array]:
    """Sum sparse vectors, in time linear in their entries.

    Values of one index are added in the order of the vectors, ``((v0 + v1) + v2)``, so that the bits of the sum depend
    on nothing else. Entries whose sum is zero stay.

    Args:
        vectors: At least one (indices, values), indices ascending and unique in 0 .. size, values of one dtype.
        size: Positions of the bucket, less than 2**31.

    Returns:
        indices: Union of the indices, ascending.
        values: The sums, in the dtype of the vectors' values.
    """
    return _cpu.merge_sum(vectors, size)


def exclude(indices: Indices, values: Array, others: Indices) -> tuple[Indices, Array]:
    """Leave out the entries of a sparse vector whose index is among others, in time linear in both.

    Args:
        indices: Ascending and unique, int32.
        values: float32 or float64, one per index.
        others: Indices to leave out, ascending and unique, int32; they need not occur in the vector.

    Returns:
        indices: Those that stay, ascending.
        values: Theirs.
    """
    return _cpu.exclude(indices, values, others)


def cut(indices: Indices, values: Array, k: int) -> tuple[tuple[Indices, Array], tuple[Indices, Array]]:
    """Part the k largest magnitudes of a sparse vector from the rest, in linear time; both keep the order.

    Magnitudes are ordered as by select: NaN above infinity, and of equal ones the entry that comes first goes first.

    Args:
        indices: int32.
        values: float32 or float64, one per index.
        k: How many entries; at most what there is.

    Returns:
        The (indices, values) of the k largest, and those of the rest.
    """
    return _cpu.cut(indices, values, k)


def count_magnitudes(values: Array, prefix: int, shift: int, bits: int) -> NDArray[np.int64]:
    """Histogram of one digit of the magnitudes: a step of radix selection, whose counts can be summed over ranks.

    The key of x is the bits of its absolute value, ``abs(x).view(int32)`` (31 bits) or ``.view(int64)`` (63 bits). Keys
    are ordered like magnitudes; its digit is made of the `bits` bits above the lowest `shift` ones.

    Args:
        values: float32 or float64 [n], contiguous.
        prefix: Only keys that agree with it in all bits above the digit are counted; its other bits do not matter.
        shift: Bits below the digit.
        bits: Width of the digit, 1 .. 16.

    Returns:
        How many of these keys have each digit, int64 [2**bits].
    """
    return _cpu.count_magnitudes(values, prefix, shift, bits)


def scatter(indices: Indices | None, values: Array, outputs: Segments, scale: float = 1.0) -> None:
    """Fill the outputs with zeros and write ``values * scale`` at the indices.

    Indices between the outputs are ignored. The product is rounded to the dtype of the values, then to that of the
    output (to nearest even; from float64 to 16 bits by way of float32).

    Args:
        indices: Ascending and unique; None: values hold all positions.
        values: float32 or float64, one per index.
        outputs: Contiguous, writable segments of any dtype.
        scale: Factor, rounded to the dtype of the values.
    """
    _cpu.scatter(indices, values, outputs, scale)


def add(indices: Indices | None, values: Array, buffer: Array) -> None:
    """Set ``buffer[indices] += values``.

    Args:
        indices: Unique positions in the buffer; None: values hold all positions.
        values: One per index, in the buffer's dtype.
        buffer: Changed in place, float32 or float64 [n].
    """
    _cpu.add(indices, values, buffer)


def simd_level() -> str:
    """Name of the instruction set in use: "avx512", "avx2" or "portable"."""
    return _cpu.simd_level()


def use_simd(level: str | None) -> None:
    """Choose the instruction set for the whole process; None: the best that this machine has.

    The environment variable HOROVOD_SPARSE_SIMD makes the initial choice. The results do not depend on it.

    Raises:
        ValueError: The level is unknown or this machine lacks it.
    """
    _cpu.use_simd(level or "")


use_simd(os.environ.get("HOROVOD_SPARSE_SIMD"))
