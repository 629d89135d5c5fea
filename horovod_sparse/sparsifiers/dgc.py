"""The sampled threshold of Deep Gradient Compression (Lin et al., ICLR 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers.base import Fused, Random
from horovod_sparse.vector import SparseVector

# Factors on the threshold while too few reach it.
_LOWER = tuple(0.8**number for number in range(1, 11))


class DGCSampling(Fused, Random):
    """Takes what reaches a threshold that is estimated from a sample, and of that at most the k largest.

    The sample is every so many-th element from a random start: 1 % of the elements, or as many as hold two of the k
    largest if that is more. Its threshold is the magnitude whose rank in the sample stands for rank k. Where fewer
    than 0.8 k entries reach it, it is multiplied by 0.8, at most ten times.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options, Random.Options):
        """Options of DGCSampling; each rank has a generator of its own."""

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Moves at most k entries out of the accumulator."""
        generator = self._draw(step, shared=False)
        threshold = _threshold(accumulator, k, generator)
        if not 0 < threshold < math.inf:  # most elements are zero, all are wanted, or something has overflowed
            return accumulator.take_largest(k, self._threads)
        vector = accumulator.take_above(threshold, self._threads)
        missing = 0.8 * k - len(vector)
        if missing > 0:
            # One pass that only reads finds the correction that suffices, where trying each could need ten that take.
            thresholds = [threshold * factor for factor in _LOWER]
            counts = accumulator.count_reaching(thresholds, self._threads)
            enough = (lower for lower, count in zip(thresholds, counts, strict=True) if count >= missing)
            vector = vector.plus(accumulator.take_above(next(enough, thresholds[-1]), self._threads))
        # The published 1.3 k, above which it selects again among the selected, comes to the same.
        return accumulator.keep_largest(vector, k)


def _threshold(accumulator: Accumulator, k: int, generator: np.random.Generator) -> float:
    """The estimate of the k-th largest magnitude; 0 where there are no more than k elements."""
    active = accumulator.active_size
    if k >= active:
        return 0.0
    samples = max(math.ceil(active / 100), math.ceil(2 * active / k))
    stride = max(1, active // samples)
    magnitudes = np.abs(accumulator.sample(int(generator.integers(stride)), stride))
    rank = math.ceil(magnitudes.size * k / active)
    return float(np.partition(magnitudes, -rank)[-rank])
