"""Where a part of a pipeline works: in one bucket, on one of the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.kernels.types import Array

# Indices are int32.
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What a memory or a sparsifier is told about its surroundings.

    Attributes:
        size: Elements n of the bucket.
        like: Array, of any length, whose dtype (float32 or float64) and device the bucket has.
        bucket: The bucket's number.
        rank: This rank.
        ranks: Ranks P that take part.
    """

    size: int
    like: Array
    bucket: int = 0
    rank: int = 0
    ranks: int = 1

    def generator(self, seed: int, step: int, *, shared: bool) -> np.random.Generator:
        """A generator for one step of this bucket, the same on every rank or this rank's own.

        It is made from its arguments alone: the number of the step is all the state that a checkpoint needs.
        """
        whose = 0 if shared else 1 + self.rank
        return np.random.default_rng([seed, self.bucket, step, whose])
