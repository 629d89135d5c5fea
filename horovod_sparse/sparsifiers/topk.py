"""Exact top-k: the k largest magnitudes travel (Aji and Heafield 2017)."""

from __future__ import annotations

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.consensus import Consensus
from horovod_sparse.sparsifiers.base import Base
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class TopK(Stateless, Base):
    """Takes exactly the k largest magnitudes; ties go to the lower index."""

    def take(self, accumulator: Accumulator, k: int, consensus: Consensus) -> SparseVector:
        """Moves the k largest magnitudes out of the accumulator, or all where there are fewer than k."""
        del consensus  # each rank chooses for itself
        return accumulator.take_largest(k, self._threads)
