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

_CORRECTIONS = 3
# Below a threshold that too few reach, where corrections may have to be counted on. Products of them are exact.
_LOWER = (0.25, 0.5, 0.75)


class GaussianK(Fused):
    """Takes what reaches the k-th magnitude that a normal distribution of the same moments would have.

    The threshold is abs(mean) - deviation * Phi^-1(density / 2). Where fewer than 2/3 k reach it, it is multiplied by
    0.5, where more than 4/3 k do, by 1.5, at most three times. Whatever then reaches it is taken: about k entries if
    gradients are nearly normal. If none does, as with constant gradients, exactly the k largest are.
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
        vector = accumulator.take_above(threshold, self._threads)
        lower: dict[float, int] = {}
        if len(vector) < 2 / 3 * k:
            # One pass that only reads, for all that may follow, and one that takes: never more, whereas to take after
            # each correction would be one to three. Where too many were taken, no pass is needed: if fewer than 2/3 k
            # of them reach 1.5 times the threshold, its next value, 0.75 times, takes in too many for certain.
            counts = accumulator.count_reaching([threshold * factor for factor in _LOWER], self._threads)
            lower = dict(zip(_LOWER, counts, strict=True))
        vector = self._at(_corrected(vector, threshold, lower, k), threshold, vector, accumulator)
        return vector if len(vector) else accumulator.take_largest(k, self._threads)

    def _at(self, factor: float, threshold: float, vector: SparseVector, accumulator: Accumulator) -> SparseVector:
        """The entries that reach a multiple of the threshold, given those that reach the threshold itself."""
        if factor < 1:
            return vector.plus(accumulator.take_above(factor * threshold, self._threads))
        return accumulator.keep_largest(vector, _count(vector, factor * threshold))


def _threshold(moments: Moments, k: int) -> float:
    """The magnitude that k of the elements would reach; 0 where there are no more than k."""
    if k >= moments.count:
        return 0.0
    mean = moments.sum / moments.count
    deviation = math.sqrt(max(0.0, moments.squares / moments.count - mean * mean))
    # The absolute mean: a change of all signs must not change what is chosen.
    return abs(mean) - deviation * NormalDist().inv_cdf(k / moments.count / 2)


def _corrected(vector: SparseVector, threshold: float, lower: dict[float, int], k: int) -> float:
    """The factor on the threshold after all corrections.

    Args:
        vector: All that reach the threshold.
        threshold: Theirs.
        lower: How many more reach the threshold times each of some factors below 1.
        k: How many should.
    """
    factor = 1.0
    for _ in range(_CORRECTIONS):
        count = _count(vector, factor * threshold) + lower.get(factor, 0)
        if count < 2 / 3 * k:
            factor *= 0.5
        elif count > 4 / 3 * k:
            factor *= 1.5
        else:
            break
    return factor


def _count(vector: SparseVector, threshold: float) -> int:
    """Number of magnitudes of a vector that reach a threshold."""
    values = vector.values
    return int(kernels_for(values).count_reaching([(0, values)], values, np.array([threshold]))[0])
