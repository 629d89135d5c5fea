"""Random-k: k positions, any k equally likely (Stich et al. 2018, sparsified SGD with memory)."""

from __future__ import annotations

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.consensus import Consensus
from horovod_sparse.kernels.types import Indices
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers.base import Random
from horovod_sparse.vector import SparseVector


class RandomK(Random):
    """Takes k positions at random, anew in every step.

    Positions that are held for now stay in the memory and travel as zeros.

    Args:
        place: The bucket and the rank.
        seed: Of this sparsifier's own generator; global generators are neither used nor changed.
        shared: Whether all ranks draw the same positions, so that only values travel, or each rank its own.

    Raises:
        ValueError: seed is negative.
    """

    def __init__(self, place: Place, *, seed: int = 0, shared: bool = True) -> None:
        super().__init__(place, seed=seed)
        self.shares_indices = bool(shared)

    def take(self, accumulator: Accumulator, k: int, consensus: Consensus) -> SparseVector:
        """Moves the values at k positions out of the accumulator, or all where there are fewer than k."""
        del consensus  # the seed and the step are the same on every rank
        generator = self._draw(shared=self.shares_indices)
        positions = _subset(generator, accumulator.size, min(k, accumulator.size))
        return accumulator.take_at(positions, shared=self.shares_indices)


def _subset(generator: np.random.Generator, size: int, k: int) -> Indices:
    """So many positions below ``size``, ascending, in a time that depends on k rather than on ``size``.

    Positions are drawn until k different ones are there, and never more draws at a time than are still missing. No
    draw prefers a position, so that every subset of k positions is equally likely.
    """
    if 2 * k > size:  # the more are there, the more draws are in vain: draw those to leave out
        return np.delete(np.arange(size, dtype=np.int32), _subset(generator, size, size - k))
    chosen = _draws(generator, size, k)
    while missing := k - len(chosen):
        more = _draws(generator, size, missing)
        places = np.searchsorted(chosen, more)
        new = chosen[np.minimum(places, len(chosen) - 1)] != more
        chosen = np.insert(chosen, places[new], more[new])
    return chosen


def _draws(generator: np.random.Generator, size: int, count: int) -> Indices:
    """The different positions among so many draws, ascending."""
    drawn = np.sort(generator.integers(max(size, 1), size=count, dtype=np.int32))
    last = np.ones(count, bool)  # of equal ones; np.unique hashes, which takes ten times as long
    np.not_equal(drawn[1:], drawn[:-1], out=last[:-1])
    return drawn[last]
