"""Random-k: k uniformly random positions (Stich et al. 2018, sparsified SGD with memory)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels.types import Indices
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import flag
from horovod_sparse.sparsifiers.base import Random
from horovod_sparse.vector import SparseVector


class RandomK(Random):
    """Selects k random positions, drawn again in every step.

    Held positions, which take no part in the step, stay in the memory and are sent as zeros.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Random.Options):
        """Options of RandomK.

        Attributes:
            shared: Draw the same positions on all ranks, so that only values are sent; otherwise, independent ones.
        """

        random_positions = True
        shared: bool = flag(True)

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(context, options)
        self.shares_indices = options.shared

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move the entries at k positions out of the accumulator, or all if there are fewer than k."""
        generator = self._draw(step, shared=self.shares_indices)
        positions = _subset(generator, accumulator.size, min(k, accumulator.size))
        return accumulator.take_at(positions, shared=self.shares_indices)

    def narrow(self, vector: SparseVector, k: int, step: Step) -> SparseVector:
        """Return k random entries of those that were taken: the k largest would not be a random selection."""
        generator = self._draw(step, shared=self.shares_indices, level=len(vector))
        return vector.part(_subset(generator, len(vector), min(k, len(vector))))


def _subset(generator: np.random.Generator, size: int, k: int) -> Indices:
    """Return k random positions below ``size``, ascending, in a time that depends on k rather than on ``size``.

    Positions are drawn until there are k different ones, each time only the number still missing. Draws are uniform, so
    every subset of k positions is equally likely.
    """
    if 2 * k > size:  # draw the positions to leave out, as fewer draws are duplicates
        return np.delete(np.arange(size, dtype=np.int32), _subset(generator, size, size - k))
    chosen = _draws(generator, size, k)
    while missing := k - len(chosen):
        more = _draws(generator, size, missing)
        places = np.searchsorted(chosen, more)
        new = chosen[np.minimum(places, len(chosen) - 1)] != more
        chosen = np.insert(chosen, places[new], more[new])
    return chosen


def _draws(generator: np.random.Generator, size: int, count: int) -> Indices:
    """Return the different positions among ``count`` draws, ascending."""
    drawn = np.sort(generator.integers(max(size, 1), size=count, dtype=np.int32))
    last = np.ones(count, bool)  # the last of equal draws; np.unique hashes, which takes ten times as long
    np.not_equal(drawn[1:], drawn[:-1], out=last[:-1])
    return drawn[last]
