"""Limit on what one step delivers, which keeps high learning rates and short warm-ups from diverging."""

from __future__ import annotations

import math

from horovod_sparse.kernels import kernels_for
from horovod_sparse.rules import Reduced

_MEAN_OVER = 10  # steps, about, that the mean covers
_FILLING = 20  # steps in which velocities grow, at a momentum of 0.9; they have no limit


class Limit:
    """Limits the norm of a total to a multiple of the mean of earlier ones.

    Args:
        most: The multiple; None: no limit.
        keepers: Number of ranks that have the total; each keeps its part of the rest.

    Attributes:
        norm: Mean of the norms of what the last steps have delivered; 0 without a limit.
    """

    def __init__(self, most: float | None, keepers: int) -> None:
        self._most, self._keepers = most, keepers
        self.norm = 0.0

    def apply(self, reduced: Reduced, carry: float, steps: int) -> Reduced:
        """Return what may be delivered; every rank that has the total keeps its part of the rest.

        Args:
            reduced: The total, and what this rank keeps.
            carry: Factor that converts norms of earlier steps to the loss scale of this one.
            steps: Number of earlier steps.
        """
        if self._most is None:
            return reduced
        values = reduced.total.values
        norm = math.sqrt(kernels_for(values).square_norm([(0, values)]))  # the same on every keeper
        mean = self.norm * carry or norm
        factor = min(1.0, self._most * mean / norm) if norm and steps >= _FILLING else 1.0
        self.norm = mean + (factor * norm - mean) / _MEAN_OVER
        if factor == 1:
            return reduced
        rest = reduced.total.times((1 - factor) / self._keepers)
        return Reduced(reduced.total.times(factor), reduced.returned.plus(rest))
