"""The sampled threshold of Deep Gradient Compression (Lin et al., ICLR 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers.base import Fused, Random
from horovod_sparse.vector import SparseVector

# Factors on the threshold that are tried if too few entries reach it.
_LOWER = tuple(0.8**number for number in range(1, 11))


class DGCSampling(Fused, Random):
    """Selects the entries that reach a threshold estimated from a sample, and of those at most the k largest.

    The sample is strided, with a random start. It has 1 % of the elements, or 2 n / k of them if that is more, so that
    two of the k largest are expected in it. The threshold is the magnitude in the sample that corresponds to the k-th
    largest of all elements. If fewer than 0.8 k entries reach it, it is multiplied by 0.8, at most ten times.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options, Random.Options):
        """Options of DGCSampling; the sample differs from rank to rank."""

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move at most k entries out of the accumulator."""
        generator = self._draw(step, shared=False)
        threshold = _threshold(accumulator, k, generator)
        if not 0 < threshold < math.inf:  # most elements are zero, k covers all, or a value overflowed
            return accumulator.take_largest(k, self._threads)
        vector = accumulator.take_above(threshold, self._threads)
        missing = 0.8 * k - len(vector)
        if missing > 0:
            # One read-only pass finds the correction that suffices; trying them in turn could need ten selections.
            thresholds = [threshold * factor for factor in _LOWER]
            counts = accumulator.count_reaching(thresholds, self._threads)
            enough = (lower for lower, count in zip(thresholds, counts, strict=True) if count >= missing)
            vector = vector.plus(accumulator.take_above(next(enough, thresholds[-1]), self._threads))
        # The paper selects again only above 1.3 k entries, with the same result.
        return accumulator.keep_largest(vector, k)


def _threshold(accumulator: Accumulator, k: int, generator: np.random.Generator) -> float:
    """Return an estimate of the k-th largest magnitude; 0 if there are no more than k elements."""
    active = accumulator.active_size
    if k >= active:
        return 0.0
    samples = max(math.ceil(active / 100), math.ceil(2 * active / k))
    stride = max(1, active // samples)
    magnitudes = np.abs(accumulator.sample(int(generator.integers(stride)), stride))
    rank = math.ceil(magnitudes.size * k / active)
    return float(np.partition(magnitudes, -rank)[-rank])
