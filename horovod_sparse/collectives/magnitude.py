"""The k-th largest magnitude of values that lie on many ranks, found without gathering them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport

_DIGIT = 8  # bits that one round settles


def kth_magnitude(transport: Transport, values: Array, k: int, most: int) -> float:
    """The k-th largest magnitude over all ranks, exactly; the same on every rank.

    A radix selection whose histograms are summed over the ranks, 256 counts in each of 4 rounds (float32): the paper
    gathers the values themselves, which are up to P k. Counts are as wide as the most that they can be: 4 bytes as a
    rule in the first round, and after it the number of values that have not been ruled out is known.

    Args:
        transport: Of the ranks that take part.
        values: This rank's values, float32 or float64, any number; NaN counts as the largest.
        k: The rank that is looked for, at least 1.
        most: All ranks together have at most so many values.

    Returns:
        The magnitude; 0 where there are fewer than k values.
    """
    count = kernels_for(values).count_magnitudes
    integer = np.dtype(f"i{values.itemsize}")
    above, shift, prefix = 0, 8 * values.itemsize - 1, 0  # magnitudes have no sign bit
    while shift > 0:
        bits = min(_DIGIT, shift)
        shift -= bits
        counts = transport.allreduce(count(values, prefix, shift, bits).astype(np.min_scalar_type(most))).astype(
            np.int64
        )
        reached = above + np.cumsum(counts[::-1])[::-1]  # how many have this digit or a larger one
        if reached[0] < k:
            return 0.0
        digit = int(np.flatnonzero(reached >= k)[-1])
        above, most = int(reached[digit] - counts[digit]), int(counts[digit])
        prefix |= digit << shift
    return float(np.array(prefix, integer).view(values.dtype))
