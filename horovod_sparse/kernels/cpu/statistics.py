"""Statistics of a bucket, computed before entries are selected."""

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import _cpu
from horovod_sparse.kernels.types import Array, Moments, Segments


def accumulate_moments(gradients: Segments, buffer: Array, scale: float = 1.0, threads: int = 1) -> Moments:
    """Accumulate, and compute the moments of the result inside the segments in the same pass.

    Every value is widened to float64 before it is multiplied or added. The order of the additions depends only on the
    segments, so the sums are bit-identical for any number of threads and any instruction set.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: Modified in place, float32 or float64 [n].
        scale: See ``accumulate``.
        threads: See ``accumulate``.

    Returns:
        Moments of the values inside the segments.
    """
    return Moments(*_cpu.accumulate_moments(gradients, buffer, scale, threads))


def largest(gradients: Segments) -> float:
    """Return the largest magnitude of all elements of the segments.

    Args:
        gradients: Segments of any dtype, stride and alignment; they may overlap.

    Returns:
        The magnitude; 0 if there are no elements, infinity if any element is infinite or NaN.
    """
    return _cpu.largest(gradients)


def block_scores(gradients: Segments, buffer: Array, block: int, threads: int = 1) -> NDArray[np.float64]:
    """Return the sum of squares of each block of consecutive positions, over positions inside the segments.

    Every value is widened to float64 before it is multiplied or added. The order of the additions is fixed. A block is
    summed in parts of 2048 positions (the last one may be shorter): position i of a part is added to lane i % 8 in
    ascending order; lanes 4 .. 7 are added to lanes 0 .. 3, then lanes 2 and 3 to lanes 0 and 1, then lane 1 to lane 0;
    lane 0 of each part in turn is added to the score. The scores are therefore bit-identical for any number of threads
    and any instruction set.

    Args:
        gradients: Segments; only their ranges matter.
        buffer: float32 or float64 [n]; read only.
        block: Positions per block, at least 1; the last block may have fewer.
        threads: See ``accumulate``.

    Returns:
        The scores, float64 [ceil(n / block)].
    """
    return _cpu.block_scores(gradients, buffer, block, threads)


def count_reaching(
    gradients: Segments, buffer: Array, thresholds: NDArray[np.float64], threads: int = 1
) -> NDArray[np.int64]:
    """Count the magnitudes inside the segments that reach each threshold, in one pass over the buffer.

    Each count is the number of elements that ``select_above`` would move if nothing were added to the buffer. NaN
    reaches every threshold.

    Args:
        gradients: Segments; only their ranges matter.
        buffer: float32 or float64 [n]; read only.
        thresholds: At most 16 thresholds, each 0 or more, in any order, float64 [m]; rounded to the buffer's dtype.
        threads: See ``accumulate``.

    Returns:
        The counts, int64 [m].
    """
    return _cpu.count_reaching(gradients, buffer, thresholds, threads)


def sample(gradients: Segments, buffer: Array, scale: float, start: int, stride: int) -> Array:
    """Return what ``accumulate`` would write at every stride-th position inside the segments; nothing is modified.

    Args:
        gradients: Segments of any dtype, stride and alignment.
        buffer: float32 or float64 [n]; read only.
        scale: See ``accumulate``.
        start: First position, counted inside the segments; 0 or more and below the stride.
        stride: Distance between positions, counted inside the segments; at least 1.

    Returns:
        The values in ascending order of position, in the buffer's dtype.
    """
    return _cpu.sample(gradients, buffer, scale, start, stride)


def square_norm(gradients: Segments) -> float:
    """Return the sum of squares of all elements in float64; its bits do not depend on the instruction set."""
    return _cpu.square_norm(gradients)
