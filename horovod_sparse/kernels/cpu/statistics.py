"""Facts about a bucket that are asked for before something leaves it."""

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.types import Array, Moments, Segments


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


def largest(gradients: Segments) -> float:
    """Return the largest magnitude of all elements of the segments.

    Args:
        gradients: As for accumulate, but the segments may overlap.

    Returns:
        0 where there is no element, infinity where one is infinite or NaN.
    """
    return _cpu.largest(gradients)


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


def count_reaching(
    gradients: Segments, buffer: Array, thresholds: NDArray[np.float64], threads: int = 1
) -> NDArray[np.int64]:
    """Count the magnitudes inside the segments that are at least each threshold, in one pass over the buffer.

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


def sample(gradients: Segments, buffer: Array, scale: float, start: int, stride: int) -> Array:
    """Return what accumulate would leave at every stride-th position inside the segments; nothing changes.

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


def square_norm(gradients: Segments) -> float:
    """Sum of the squares of all elements of the segments, in float64; its bits do not depend on the instruction set."""
    return _cpu.square_norm(gradients)
