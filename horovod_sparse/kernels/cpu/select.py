"""Accumulation into a bucket's buffer and selection of its entries."""

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.types import Array, Indices, Segments, Velocity


def accumulate(
    gradients: Segments,
    buffer: Array,
    scale: float = 1.0,
    threads: int = 1,
    *,
    source: Array | None = None,
    clear: bool = False,
    velocity: Velocity | None = None,
) -> None:
    """Set ``buffer <- scale * source``, plus the gradients inside their segments.

    Product and sum are rounded separately, as in NumPy. With scale 0 the source is ignored, even NaN.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Overwritten, float32 or float64 [n].
        scale: Finite factor, rounded to the buffer's dtype.
        threads: Number of threads; the result does not depend on it.
        source: Array to scale, in the buffer's dtype [n]; not modified. None: the buffer itself.
        clear: Set the gradients to zero in the same pass; they must then be contiguous and writable.
        velocity: Momentum to apply to the gradients first, in the same pass.
    """
    _cpu.accumulate(gradients, buffer, scale, threads, source, clear, velocity)


def select(
    gradients: Segments,
    buffer: Array,
    k: int,
    scale: float = 1.0,
    threads: int = 1,
    *,
    source: Array | None = None,
    clear: bool = False,
    velocity: Velocity | None = None,
) -> tuple[Indices, Array]:
    """Accumulate, then move the k largest magnitudes inside the segments out of the buffer, leaving zeros.

    The kernel makes one pass over gradients and buffer. Thresholds estimated from a sample decide most elements during
    the pass; the few undecided ones are ranked exactly. If the sample misleads, radix selection follows, so the result
    is exact for every input. Magnitudes are ordered by the bits of the absolute value: NaN above infinity above every
    number. Ties go to the lower position.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Overwritten, float32 or float64 [n].
        k: Number of elements to move, capped at the number of positions inside the segments.
        scale: See ``accumulate``.
        threads: See ``accumulate``.
        source: See ``accumulate``.
        clear: See ``accumulate``.
        velocity: See ``accumulate``.

    Returns:
        indices: Selected positions, ascending and unique, int32 [min(k, positions inside the segments)].
        values: Values moved from these positions, in the buffer's dtype.
    """
    return _cpu.select(gradients, buffer, k, scale, threads, source, clear, velocity)


def select_above(
    gradients: Segments,
    buffer: Array,
    threshold: float,
    scale: float = 1.0,
    threads: int = 1,
    *,
    source: Array | None = None,
    clear: bool = False,
    velocity: Velocity | None = None,
) -> tuple[Indices, Array]:
    """Accumulate, then move all magnitudes inside the segments that reach the threshold out of the buffer.

    The kernel makes one pass over gradients and buffer and leaves zeros at the selected positions. Magnitudes are
    ordered as in ``select``, so NaN reaches every threshold. If memory for the entries runs out (MemoryError), nothing
    has been moved: the buffer holds the sum.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Overwritten, float32 or float64 [n].
        threshold: 0 or more, rounded to the buffer's dtype; 0 selects everything inside the segments.
        scale: See ``accumulate``.
        threads: See ``accumulate``.
        source: See ``accumulate``.
        clear: See ``accumulate``.
        velocity: See ``accumulate``.

    Returns:
        indices: Selected positions, ascending and unique, int32.
        values: Values moved from these positions, in the buffer's dtype.
    """
    return _cpu.select_above(gradients, buffer, threshold, scale, threads, source, clear, velocity)


def cut(indices: Indices, values: Array, k: int) -> tuple[tuple[Indices, Array], tuple[Indices, Array]]:
    """Split a sparse vector into its k largest magnitudes and the rest, in linear time; both keep the order.

    Magnitudes are ordered as in ``select``: NaN above infinity; ties go to the earlier entry.

    Args:
        indices: int32.
        values: float32 or float64, one per index.
        k: Number of entries to select, capped at the number of entries.

    Returns:
        (indices, values) of the k largest, and (indices, values) of the rest.
    """
    return _cpu.cut(indices, values, k)


def take(gradients: Segments, buffer: Array, positions: Indices | None) -> Array:
    """Move the values at given positions out of the buffer, leaving zeros.

    Held positions keep their values in the buffer; 0 is returned for them.

    Args:
        gradients: Segments; only their ranges matter.
        buffer: Modified in place, float32 or float64 [n].
        positions: Ascending and unique, int32 [m]; None: all positions.

    Returns:
        The values, in the buffer's dtype, [m] or [n].
    """
    return _cpu.take(gradients, buffer, positions)
