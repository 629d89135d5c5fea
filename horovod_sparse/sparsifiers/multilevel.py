"""Top-k in two levels: compress, then compress the result again (GraVAC)."""

from __future__ import annotations

import math

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.consensus import Consensus
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers.base import Base
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class MultiLevel(Stateless, Base):
    """Takes exactly the k largest magnitudes, as TopK does, out of the largest that a smaller factor leaves.

    Args:
        place: The bucket and the rank.
        cf_min: Compression factor of the first level; where k is more than it leaves, there is no second one.
        threads: Threads of the fused kernel; the selection does not depend on it.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(self, place: Place, *, cf_min: float = 10.0, threads: int = 1) -> None:
        super().__init__(place, threads=threads)
        if not 1 <= cf_min < math.inf:
            raise ValueError(f"cf_min must be a finite number of at least 1, not {cf_min}: 10 leaves a tenth")
        self._cf_min = cf_min

    def take(self, accumulator: Accumulator, k: int, consensus: Consensus) -> SparseVector:
        """Moves the k largest magnitudes out of the accumulator, or all where there are fewer than k."""
        del consensus  # each rank chooses for itself
        first = int(accumulator.active_size / self._cf_min)
        return accumulator.keep_largest(accumulator.take_largest(max(k, first), self._threads), k)
