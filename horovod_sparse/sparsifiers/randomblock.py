"""Random block-k: k consecutive positions from a random start that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers.base import Random
from horovod_sparse.vector import SparseVector


class RandomBlock(Random):
    """Selects k consecutive positions, the same on every rank; the block wraps around at the end of the bucket.

    Held positions, which take no part in the step, stay in the memory and are sent as zeros.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Random.Options):
        """Options of RandomBlock: the seed."""

        random_positions = True

    shares_indices = True

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move the block out of the accumulator."""
        size, start = accumulator.size, self._start(accumulator.size, step)
        stop = start + min(k, size)
        wrapped = np.arange(max(0, stop - size), dtype=np.int32)
        positions = np.concatenate([wrapped, np.arange(start, min(stop, size), dtype=np.int32)])
        return accumulator.take_at(positions, shared=True)

    def _start(self, size: int, step: Step) -> int:
        return int(self._draw(step, shared=True).integers(max(size, 1)))

    def narrow(self, vector: SparseVector, k: int, step: Step) -> SparseVector:
        """Return the first k positions of the block, which are again a block with a random start."""
        taken = len(vector)
        wrapped = max(0, self._start(vector.size, step) + taken - vector.size)  # these entries come first
        places = np.arange(wrapped, wrapped + min(k, taken), dtype=np.int32) % max(taken, 1)
        return vector.part(np.sort(places))
