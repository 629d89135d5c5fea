"""Gaussian-k: a threshold that assumes normally distributed gradients (Shi et al. 2019, TopK-SGD)."""

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
    """Selects the entries that reach the k-th magnitude of a normal distribution with the same moments.

    The threshold is abs(mean) - deviation * Phi^-1(density / 2). If fewer than 2/3 k entries reach it, it is multiplied
    by 0.5; if more than 4/3 k do, by 1.5. As in the authors' code, at most three thresholds are evaluated, and the
    entries that reach the last one are taken: about k if gradients are nearly normal. If there are none, as with
    constant gradients, exactly the k largest are taken.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """The common options of rules with fused kernels."""

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move about k entries out of the accumulator."""
        del step
        moments = accumulator.moments(self._threads)
        threshold = _threshold(moments, k)
        if not 0 < threshold < math.inf:  # all elements are zero, k covers all, or a value overflowed
            return accumulator.take_largest(k, self._threads)
        vector = self._evaluated_last(accumulator, threshold, k)
        return vector if len(vector) else accumulator.take_largest(k, self._threads)

    def _evaluated_last(self, accumulator: Accumulator, threshold: float, k: int) -> SparseVector:
        """Move the entries that reach the last of the thresholds out of the accumulator.

        Only a threshold below all earlier ones needs another pass. A higher one is evaluated on the entries already
        taken, and at the end the excess is put back.
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
    """Return the magnitude that k elements would reach; 0 if there are no more than k."""
    if k >= moments.count:
        return 0.0
    mean = moments.sum / moments.count
    deviation = math.sqrt(max(0.0, moments.squares / moments.count - mean * mean))
    # With the absolute mean, flipping all signs does not change the selection.
    return abs(mean) - deviation * NormalDist().inv_cdf(k / moments.count / 2)


def _count(vector: SparseVector, threshold: float) -> int:
    """Return how many magnitudes of a vector reach a threshold."""
    values = vector.values
    return int(kernels_for(values).count_reaching([(0, values)], values, np.array([threshold]))[0])
