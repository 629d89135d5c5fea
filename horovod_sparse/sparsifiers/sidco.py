"""SIDCo: a threshold from exponential distributions fitted in stages (Abdelmoniem et al., MLSys 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector

# Fractions of the entries that the first stage and each further one keep; the last stage keeps what is then left of
# the density.
_FIRST, _NEXT = 0.75, 0.25


class SIDCo(Fused):
    """Selects the entries that reach a threshold for exponentially distributed magnitudes, corrected in the tail.

    The first stage fits an exponential to all magnitudes: the threshold that a fraction d of them reaches is
    -mean * ln(d). Each further stage fits one to the magnitudes above the last threshold, which is raised by
    -(their mean - threshold) * ln(d). The fractions are 3/4, then 1/4 in each stage, and in the last stage what is then
    left of k: more stages follow the tail more closely. About k entries are selected.

    The paper also changes the number of stages during training, after the numbers of entries in the last steps.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """The common options of rules with fused kernels."""

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move about k entries out of the accumulator; exactly the k largest if a threshold is not defined."""
        del step
        moments = accumulator.moments(self._threads)
        mean = moments.magnitudes / max(moments.count, 1)
        if k >= moments.count or not 0 < mean < math.inf:  # k covers all, all are zero, or a value overflowed
            return accumulator.take_largest(k, self._threads)
        first, *further = _fractions(k / moments.count)
        threshold, most = -mean * math.log(first), float(np.finfo(accumulator.buffer.dtype).max)
        for fraction in further:
            count, total = accumulator.tail(threshold, self._threads)
            if not count:
                break
            threshold = min(threshold - (total / count - threshold) * math.log(fraction), most)
        vector = accumulator.take_above(threshold, self._threads)
        return vector if len(vector) else accumulator.take_largest(k, self._threads)


def _fractions(density: float) -> list[float]:
    """Return the fraction that each stage keeps; their product is the density, below 1."""
    if density >= _FIRST:
        return [density]
    rest = density / _FIRST
    further = math.ceil(math.log(rest) / math.log(_NEXT)) - 1
    return [_FIRST, *[_NEXT] * further, rest / _NEXT**further]
