"""Count sketches."""

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.types import Array, Indices


def sketch_length(size: int, ratio: float, rows: int) -> int:
    """Return the length of a count sketch that takes about `ratio` of the memory of a bucket.

    Args:
        size: Number of positions of the bucket, less than 2**31.
        ratio: Above 0, at most 1. Small buckets exceed it: a row has at least 16 counters for every 16384 positions.
        rows: Number of independent estimates of each element, 1, 3 or 5; the rows share the counters.

    Returns:
        The number of counters; 0 for size 0. A sketch is a float32 or float64 array of this length, with any content.
    """
    return _cpu.sketch_length(size, ratio, rows)


def sketch_update(sketch: Array, buffer: Array, delivered: Indices, rows: int, seed: int, carried: float = 0.0) -> None:
    """Update a count sketch to hold a buffer that contains its estimates (Charikar, Chen and Farach-Colton 2002).

    Adds ``buffer - carried * estimates``. At delivered positions, adds the buffer alone and subtracts the position's
    share of what was carried: 1 / L of a counter that L positions share. With ``carried=0`` this adds the buffer.
    Sketches are linear: for the same size, rows and seed, the sum of two sketches is the sketch of the sum, up to
    rounding.

    An element has one counter per row, to which it is added with a random sign. Positions are divided into sections
    with separate counters, and 16 adjacent positions map to 16 adjacent counters, so that sketches are read and written
    at memory speed. For one row of w counters, ``E ||query(sketch(x)) - x||**2 <= (size / w) * ||x||**2``, as for the
    textbook sketch. Precisely, the bound is the sum of these bounds over the sections, each of which has counters in
    proportion to its positions.

    Args:
        sketch: Modified in place, float32 or float64 [a sketch_length for the buffer's size and these rows].
        buffer: Values in the sketch's dtype [n].
        delivered: Positions that have left the buffer since the query, ascending and unique, int32. There, the
            buffer holds what the exchange returned.
        rows: 1, 3 or 5.
        seed: Seed of counters and signs, 0 .. 2**63 - 1; the same for all updates and queries of the sketch.
        carried: Finite factor of the estimates in the buffer, rounded to the sketch's dtype.
    """
    _cpu.sketch_update(sketch, buffer, delivered, rows, seed, carried)


def sketch_query(sketch: Array, buffer: Array, rows: int, seed: int, scale: float = 1.0, *, add: bool = False) -> None:
    """Set ``buffer <- scale * estimates`` of all elements that were added to a count sketch.

    The estimate of an element is the median over the rows of its counter times its sign. It is unbiased: its mean over
    random seeds is the element. NaN and infinity are estimated as themselves, and may corrupt the estimates of elements
    that share their counters.

    Args:
        sketch: float32 or float64 [a sketch_length for the buffer's size and these rows].
        buffer: Overwritten, in the sketch's dtype [n].
        rows: See ``sketch_update``.
        seed: See ``sketch_update``.
        scale: Finite factor, rounded to the buffer's dtype.
        add: Add to the buffer instead of overwriting it.
    """
    _cpu.sketch_query(sketch, buffer, rows, seed, scale, add)
