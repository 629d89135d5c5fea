"""Accumulation, and what moves entries out of a bucket."""

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

    Product and sum are rounded separately, like NumPy's. With scale 0 the source's content does not count, even where
    it is NaN.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Overwritten, float32 or float64 [n].
        scale: Finite factor, rounded to the buffer's dtype.
        threads: How many threads share the work; the result does not depend on it.
        source: What the buffer is made of, in its dtype [n]; it stays as it is. None: the buffer's own content.
        clear: Leave zeros in the gradients, which then must be contiguous and writable, in the same pass.
        velocity: Of momentum, which is applied to the gradients first, in the same pass.
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
    """Accumulate, then move the k largest magnitudes inside the segments out of the buffer, which keeps zeros.

    One pass over gradients and buffer: thresholds that are estimated from a sample settle most elements on the way,
    and the few that they leave open are ranked exactly. Where the sample misleads, radix selection follows, so that
    the result is exact for every input. Magnitudes are ordered by the bits of the absolute value: NaN above infinity
    above every number. Of equal magnitudes the lower position goes first.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Overwritten, float32 or float64 [n].
        k: How many elements leave; at most what the segments hold.
        scale: As for accumulate.
        threads: As for accumulate.
        source: As for accumulate.
        clear: As for accumulate.
        velocity: As for accumulate.

    Returns:
        indices: Positions that left, ascending and unique, int32 [min(k, positions inside the segments)].
        values: What they held, in the buffer's dtype.
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
    """Accumulate, then move every magnitude of at least the threshold inside the segments out of the buffer.

    One pass over gradients and buffer, which keeps zeros where elements left. Magnitudes are ordered as for select:
    NaN leaves whatever the threshold. When the memory for what leaves runs out (MemoryError), nothing has left: the
    buffer holds the sum.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Overwritten, float32 or float64 [n].
        threshold: 0 or more, rounded to the buffer's dtype; 0 takes everything inside the segments.
        scale: As for accumulate.
        threads: As for accumulate.
        source: As for accumulate.
        clear: As for accumulate.
        velocity: As for accumulate.

    Returns:
        indices: Positions that left, ascending and unique, int32.
        values: What they held, in the buffer's dtype.
    """
    return _cpu.select_above(gradients, buffer, threshold, scale, threads, source, clear, velocity)


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
