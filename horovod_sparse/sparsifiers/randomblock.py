"""Random block-k: k consecutive positions from a random start that all ranks share."""

from __future__ import annotations

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.consensus import Consensus
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers.base import Random
from horovod_sparse.vector import SparseVector


class RandomBlock(Random):
    """Takes k consecutive positions, which wrap around at the end; the same on every rank.

    Positions that are held for now stay in the memory and travel as zeros.

    Args:
        place: The bucket and the rank.
        seed: Of this sparsifier's own generator; global generators are neither used nor changed.

    Raises:
        ValueError: seed is negative.
    """

    shares_indices = True

    def __init__(self, place: Place, *, seed: int = 0) -> None:
        super().__init__(place, seed=seed)

    def take(self, accumulator: Accumulator, k: int, consensus: Consensus) -> SparseVector:
        """Moves the block out of the accumulator."""
        del consensus  # the seed and the step are the same on every rank
        size = accumulator.size
        start = int(self._draw(shared=True).integers(max(size, 1)))
        stop = start + min(k, size)
        wrapped = np.arange(max(0, stop - size), dtype=np.int32)
        positions = np.concatenate([wrapped, np.arange(start, min(stop, size), dtype=np.int32)])
        return accumulator.take_at(positions, shared=True)
