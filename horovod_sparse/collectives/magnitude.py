"""The k-th largest magnitude of values distributed over the ranks, found without gathering them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport

_DIGIT = 8  # bits per round


class KthMagnitude(NamedTuple):
    """The k-th largest magnitude.

    Attributes:
        value: The magnitude.
        equal: Number of values that have it, on all ranks together.
        wanted: How many of them are among the k largest, at least 1.
    """

    value: float
    equal: int = 1
    wanted: int = 1


def kth_magnitude(transport: Transport, values: Array, k: int, most: int) -> KthMagnitude:
    """Return the exact k-th largest magnitude over all ranks, the same on each; 0 if there are fewer than k values.

    Radix selection over histograms that are summed over the ranks: 256 counts in each of 4 rounds (float32). The paper
    gathers the values instead, up to P k of them. Counts have the narrowest integer type that fits. That is usually 4
    bytes in the first round; later, the number of remaining values is known and limits them.

    Args:
        transport: Transport of the participating ranks.
        values: Values of this rank, float32 or float64, any number of them; NaN counts as the largest.
        k: Position in descending order, at least 1.
        most: Upper bound of the number of values on all ranks together.
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
        reached = above + np.cumsum(counts[::-1])[::-1]  # number of values with this digit or a larger one
        if reached[0] < k:
            return KthMagnitude(0.0)
        digit = int(np.flatnonzero(reached >= k)[-1])
        above, most = int(reached[digit] - counts[digit]), int(counts[digit])
        prefix |= digit << shift
    return KthMagnitude(float(np.array(prefix, integer).view(values.dtype)), equal=most, wanted=k - above)
