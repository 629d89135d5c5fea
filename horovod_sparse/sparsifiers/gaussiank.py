"""Gaussian-k: a threshold from mean and deviation, as if gradients were normal (Shi et al. 2019, TopK-SGD)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Moments
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector

_EVALUATIONS = 3


class GaussianK(Fused):
    """Takes what reaches the k-th magnitude that a normal distribution of the same moments would have.

    The threshold is abs(mean) - deviation * Phi^-1(density / 2). Where fewer than 2/3 k reach it, it is multiplied by
    0.5, where more than 4/3 k do, by 1.5. Three thresholds are evaluated at most, as by the authors, and what reaches
    the last of them is taken: about k entries if gradients are nearly normal. If none does, as with constant
    gradients, exactly the k largest are.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """Options of GaussianK: those of every rule with fused kernels."""

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Moves about k entries out of the accumulator."""
        del step
        moments = accumulator.moments(self._threads)
        threshold = _threshold(moments, k)
        if not 0 < threshold < math.inf:  # all is zero, all is wanted, or something has overflowed
            return accumulator.take_largest(k, self._threads)
        vector = self._evaluated_last(accumulator, threshold, k)
        return vector if len(vector) else accumulator.take_largest(k, self._threads)

    def _evaluated_last(self, accumulator: Accumulator, threshold: float, k: int) -> SparseVector:
        """Moves what reaches the last of the thresholds out of the accumulator.

        Every threshold below all others is a pass, which takes what reaches it: two at most, and one as a rule, since
        what a higher one leaves behind is cut off again among the entries that were taken.
        """
        vector = accumulator.take_above(threshold, self._threads)
        factor = lowest = 1.0
        count = len(vector)
        for _ in range(_EVALUATIONS - 1):
            if 2 / 3 * k <= count <= 4 / 3 * k:
                break
            factor *= 0.5 if count < 2 / 3 * k else 1.5
            if factor < lowest:
                vector = vector.plus(accumulator.take_above(factor * threshold, self._threads))
                lowest = factor
            count = _count(vector, factor * threshold)
        return accumulator.keep_largest(vector, count) if factor > lowest else vector


def _threshold(moments: Moments, k: int) -> float:
    """The magnitude that k of the elements would reach; 0 where there are no more than k."""
    if k >= moments.count:
        return 0.0
    mean = moments.sum / moments.count
    deviation = math.sqrt(max(0.0, moments.squares / moments.count - mean * mean))
    # The absolute mean: a change of all signs must not change what is chosen.
    return abs(mean) - deviation * NormalDist().inv_cdf(k / moments.count / 2)


def _count(vector: SparseVector, threshold: float) -> int:
    """Number of magnitudes of a vector that reach a threshold."""
    values = vector.values
    return int(kernels_for(values).count_reaching([(0, values)], values, np.array([threshold]))[0])
