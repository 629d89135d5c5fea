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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.formats import check_own, format_of, largest
from horovod_sparse.kernels.types import Array, Indices, Moments, Segments


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


def accumulate_moments(gradients: Segments, buffer: Array, scale: float = 1.0, threads: int = 1) -> Moments:
    """Accumulate, and sum up what is then inside the segments, in the same pass.

    Every value is widened to float64 before it is multiplied or added. The order of the additions depends on the
    segments alone, so that the bits of the sums depend neither on the threads nor on the instruction set.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Changed in place, float32 or float64 [n].
        scale: As for accumulate.
        threads: As for accumulate.

    Returns:
        Moments of the values inside the segments.
    """
    return Moments(*_cpu.accumulate_moments(gradients, buffer, scale, threads))


def count_reaching(
    gradients: Segments, buffer: Array, thresholds: NDArray[np.float64], threads: int = 1
) -> NDArray[np.int64]:
    """How many magnitudes inside the segments are at least each threshold, in one pass over the buffer.

    These are the elements that select_above would take, if nothing were added to the buffer: NaN reaches every
    threshold.

    Args:
        gradients: Segments, of which only where they lie matters.
        buffer: float32 or float64 [n]; read only.
        thresholds: At most 16, in any order, each 0 or more, float64 [m]; rounded to the buffer's dtype.
        threads: As for accumulate.

    Returns:
        The counts, int64 [m].
    """
    return _cpu.count_reaching(gradients, buffer, thresholds, threads)


def square_norm(gradients: Segments) -> float:
    """Sum of the squares of all elements of the segments, in float64; its bits do not depend on the instruction set."""
    return _cpu.square_norm(gradients)


def block_scores(gradients: Segments, buffer: Array, block: int, threads: int = 1) -> NDArray[np.float64]:
    """Sum of the squares in each block of consecutive positions, at those inside the segments.

    Every value is widened to float64 before it is multiplied or added. The order of the additions is fixed: of every
    2048 positions of a block (fewer in its last part), number i goes to lane i % 8 in ascending order; lanes 0 .. 3 are
    increased by lanes 4 .. 7, then lanes 0 and 1 by lanes 2 and 3, then lane 0 by lane 1; lane 0 of each part in turn
    is added to the score. So the bits depend neither on the threads nor on the instruction set.

    Args:
        gradients: Segments, of which only where they lie matters.
        buffer: float32 or float64 [n]; read only.
        block: Positions of a block, at least 1; the last one may have fewer.
        threads: As for accumulate.

    Returns:
        The scores, float64 [ceil(n / block)].
    """
    return _cpu.block_scores(gradients, buffer, block, threads)


def sample(gradients: Segments, buffer: Array, scale: float, start: int, stride: int) -> Array:
    """What accumulate would leave at every stride-th position inside the segments; nothing changes.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: float32 or float64 [n]; read only.
        scale: As for accumulate.
        start: Number of the first position, counted inside the segments; 0 or more and below the stride.
        stride: From one position to the next, counted likewise; at least 1.

    Returns:
        The values in ascending order of position, in the buffer's dtype.
    """
    return _cpu.sample(gradients, buffer, scale, start, stride)


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


def take(gradients: Segments, buffer: Array, positions: Indices | None) -> Array:
    """Move what lies at given positions out of the buffer, which keeps zeros.

    Positions that are held stay in the buffer, and their value is 0.

    Args:
        gradients: Segments, of which only where they lie matters.
        buffer: Changed in place, float32 or float64 [n].
        positions: Ascending and unique, int32 [m]; None: all positions.

    Returns:
        The values, in the buffer's dtype, [m] or [n].
    """
    return _cpu.take(gradients, buffer, positions)


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
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected a contiguous, flat array, not one of shape {array.shape}")
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


def sketch_length(size: int, ratio: float, rows: int) -> int:
    """Number of counters of a count sketch that takes about `ratio` of the memory of a bucket.

    Args:
        size: Positions of the bucket, less than 2**31.
        ratio: Above 0, at most 1. Small buckets need more: 16 counters in each row for every 16384 positions.
        rows: 1, 3 or 5 independent estimates of every element, which share the counters.

    Returns:
        The length for sketches of the bucket, which are float32 or float64 arrays of any content; 0 for size 0.
    """
    return _cpu.sketch_length(size, ratio, rows)


def sketch_update(sketch: Array, buffer: Array, delivered: Indices, rows: int, seed: int, carried: float = 0.0) -> None:
    """Make a count sketch of a bucket hold a buffer that was made out of it (Charikar, Chen and Farach-Colton 2002).

    Adds ``buffer - carried * estimates``, and where a position was delivered, the buffer alone, less its share of what
    was carried: 1 / L of a counter that L positions share. With ``carried=0`` this adds the buffer. A sketch is linear:
    of the same size, rows and seed, the sum of two sketches is the sketch of the sum, up to rounding.

    Of each row, an element has one counter, to which it is added with a random sign. Positions are divided into
    sections with counters of their own, and 16 adjacent positions go to 16 adjacent counters, so that sketches are
    written and read at the speed of memory. For one row of w counters,
    ``E ||query(sketch(x)) - x||**2 <= (size / w) * ||x||**2``, as for the textbook's sketch: precisely, the sum of
    these bounds over the sections, to each of which counters are allotted in proportion to its positions.

    Args:
        sketch: Changed in place, float32 or float64 [a sketch_length of the buffer's size and these rows].
        buffer: In the sketch's dtype [n].
        delivered: Positions that have left the buffer since, ascending and unique, int32; there the buffer holds what
            came back.
        rows: 1, 3 or 5.
        seed: 0 .. 2**63 - 1, of counters and signs; the same for whoever updates the sketch or queries it.
        carried: Finite factor on the estimates that are in the buffer, rounded to the sketch's dtype.
    """
    _cpu.sketch_update(sketch, buffer, delivered, rows, seed, carried)


def sketch_query(sketch: Array, buffer: Array, rows: int, seed: int, scale: float = 1.0, *, add: bool = False) -> None:
    """Set ``buffer <- scale * estimates`` of all elements that were added to a count sketch.

    The estimate of an element is the median over the rows of its counter times its sign. It is unbiased: over random
    seeds, its mean is the element. A NaN or an infinity is its own estimate too, and may spoil those of elements with
    which it shares a counter.

    Args:
        sketch: float32 or float64 [a sketch_length of the buffer's size and these rows].
        buffer: Overwritten, in the sketch's dtype [n].
        rows: As for sketch_update.
        seed: As for sketch_update.
        scale: Finite factor, rounded to the buffer's dtype.
        add: Add to the buffer instead of overwriting it.
    """
    _cpu.sketch_query(sketch, buffer, rows, seed, scale, add)


def quantize(buffer: Array, bits: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round every element at random to one of the two levels next to it, so that its mean is the element.

    As QSGD (Alistarh et al., NeurIPS 2017), with a norm for each block of 256 elements: its largest magnitude. With
    ``L = 2**(bits - 1) - 1``, the levels of a block are the multiples ``-L .. L`` of its unit, which is the largest
    magnitude / L, rounded up to 16 significant bits, so that every level is a float32. The variance of an element is
    at most ``unit**2 / 4``, its bias at most ``2**-24`` units. Elements on a level stay as they are.

    A block of zeros has unit 0. A block with an infinity or a NaN, or whose unit exceeds float32, has unit NaN:
    dequantize makes all of it NaN. The least unit of others is 2**-126.

    Args:
        buffer: float32 or float64 [n].
        bits: Of a code, 4 or 8.
        seed: 0 .. 2**63 - 1. What is drawn for an element depends on it and the position only; take another seed each
            time, or the errors add up.

    Returns:
        The codes, multiples stored as 0 .. 2 L, uint8 [n]; with 4 bits two per byte, [ceil(n / 2)], where byte i of a
        block of m elements holds those of its elements i (lower half) and i + ceil(m / 2). The units, float32
        [ceil(n / 256)].
    """
    return _cpu.quantize(buffer, bits, seed)


def dequantize(
    codes: NDArray[np.uint8],
    units: NDArray[np.float32],
    buffer: Array,
    bits: int,
    scale: float = 1.0,
    *,
    add: bool = False,
) -> None:
    """Set ``buffer <- scale *`` what quantize rounded its buffer to.

    Args:
        codes: From quantize, of a buffer of the same length.
        units: From quantize.
        buffer: Overwritten, float32 or float64 [n].
        bits: As for quantize.
        scale: Finite; its product with a block's unit is rounded to the buffer's dtype, then that with the multiples.
        add: Add to the buffer instead of overwriting it.
    """
    _cpu.dequantize(codes, units, buffer, bits, scale, add)


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
