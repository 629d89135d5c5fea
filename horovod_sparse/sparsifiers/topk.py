"""Exact top-k: the k largest magnitudes travel (Aji and Heafield 2017)."""

from __future__ import annotations

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.sparsifiers.consensus import Consensus
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class TopK(Stateless):
    """Takes exactly the k largest magnitudes; ties go to the lower index.

    Args:
        threads: Threads of the fused kernel; the selection does not depend on it.

    Raises:
        ValueError: threads is below 1.
    """

    def __init__(self, *, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._threads = threads

    def take(self, accumulator: Accumulator, k: int, consensus: Consensus) -> SparseVector:
        """Moves the k largest magnitudes out of the accumulator, or all where there are fewer than k."""
        del consensus  # each rank chooses for itself
        return accumulator.take_largest(k, self._threads)
