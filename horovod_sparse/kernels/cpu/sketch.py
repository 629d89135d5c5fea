"""Count sketches."""

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.types import Array, Indices


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
