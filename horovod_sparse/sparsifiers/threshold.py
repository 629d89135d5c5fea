"""A fixed threshold: every magnitude that reaches it travels (Strom 2015)."""

from __future__ import annotations

import math

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.consensus import Consensus
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers.base import Base
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class Threshold(Stateless, Base):
    """Takes every magnitude of at least a given one; how many these are follows from the gradients, not from k.

    Args:
        place: The bucket and the rank.
        threshold: In units of the gradients; must be given.
        threads: Threads of the fused kernel; the selection does not depend on it.

    Raises:
        ValueError: A number is missing or out of range.
    """

    def __init__(self, place: Place, *, threshold: float | None = None, threads: int = 1) -> None:
        super().__init__(place, threads=threads)
        if not isinstance(threshold, (int, float)) or not 0 < threshold < math.inf:
            raise ValueError(
                f"threshold must be a finite number above 0, not {threshold!r}: give the option threshold, the "
                "smallest magnitude that is to be sent"
            )
        self._threshold = float(threshold)

    def take(self, accumulator: Accumulator, k: int, consensus: Consensus) -> SparseVector:
        """Moves all that reach the threshold out of the accumulator."""
        del k, consensus  # each rank chooses for itself, as many as there are
        return accumulator.take_above(self._threshold, self._threads)
