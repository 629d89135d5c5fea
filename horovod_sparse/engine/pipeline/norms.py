"""Norms of one step, for ``statistics(norms=True)``."""

from __future__ import annotations

import math

import numpy as np

from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Segments
from horovod_sparse.metrics.counts import Counts
from horovod_sparse.rules import Accumulator, SparseVector, Step


class Norms:
    """Sums of squares in one step, without the loss scale; takes one pass before and one after the selection.

    The norm of the residual is taken before the memory compresses or drops it.

    Args:
        step: The step, with this rank's gradients.
    """

    def __init__(self, step: Step) -> None:
        self._gradient = step.square_norm()
        self._selected, self._rest, self._back = self._gradient, 0.0, 0.0
        self._scale = step.loss_scale**2

    def taken(self, accumulator: Accumulator, vector: SparseVector) -> None:
        """Record the norms of the selected entries and of the remaining accumulator."""
        self._selected = _square([(0, vector.values)]) / self._scale
        self._rest = _square(accumulator.active()) / self._scale

    def returned(self, accumulator: Accumulator, returned: SparseVector) -> None:
        """Record what the exchange returned; some of it may be added to entries left in the accumulator."""
        values = returned.values
        if len(returned):
            left = accumulator.buffer if returned.indices is None else accumulator.buffer[returned.indices]
            left = left.astype(np.float64)
            self._back = float((values * (2 * left + values)).sum()) / self._scale

    def note(self, counts: Counts) -> bool:
        """Write the sums into the counts and return True; False if one is not finite, as with a high loss scale."""
        if not math.isfinite(self._gradient + self._selected + self._rest + self._back):
            return False
        counts.measured, counts.gradient, counts.selected = 1, self._gradient, self._selected
        counts.accumulated, counts.held = self._selected + self._rest, max(0.0, self._rest + self._back)
        return True


def _square(segments: Segments) -> float:
    """Return the sum of squares in float64."""
    return float(kernels_for(segments[0][1]).square_norm(segments)) if segments else 0.0
