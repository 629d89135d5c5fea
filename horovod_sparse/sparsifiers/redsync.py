"""The threshold of RedSync, found by bisection between mean and maximum (Fang et al. 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector

_PARTS = 8  # three bisections leave an interval of 1/8, below the 0.2 at which the search ends


class RedSync(Fused):
    """Selects the magnitudes that reach mean + r (max - mean), where r is found by bisection of [0, 1].

    The search ends when at least k and fewer than 2k entries reach the threshold, or when r is known to 0.2. If the
    magnitudes are widely spread, the number of entries may then be far from k.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """The common options of rules with fused kernels."""

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move about k to 2k entries out of the accumulator."""
        del step
        moments = accumulator.moments(self._threads)
        mean = moments.magnitudes / max(moments.count, 1)
        if k >= moments.count or not 0 < mean < math.inf:  # k covers all, all are zero, or a value overflowed
            return accumulator.take_largest(k, self._threads)
        # One pass counts for every r that the bisection can reach. The minimum is needed because the mean of equal
        # magnitudes may be rounded up.
        largest = moments.largest
        thresholds = [min(mean + part / _PARTS * (largest - mean), largest) for part in range(1, _PARTS)]
        counts = accumulator.count_reaching(thresholds, self._threads)
        return accumulator.take_above(thresholds[_bisect(counts, k)], self._threads)


def _bisect(counts: list[int], k: int) -> int:
    """Return the position in ``counts`` where the bisection ends.

    Args:
        counts: Numbers of entries that reach the thresholds for r = 1/8, 2/8, ... 7/8.
        k: Least number of entries to select; 2k are too many.
    """
    low, high = 0, _PARTS
    part = high // 2
    while not k <= counts[part - 1] < 2 * k and high - low > 2:
        low, high = (low, part) if counts[part - 1] < k else (part, high)
        part = (low + high) // 2
    return part - 1
