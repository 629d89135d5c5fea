"""AR-Topk: the positions of one rank's largest entries serve for all ranks (Tyagi and Swany 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import kernels_for
from horovod_sparse.rules import Step
from horovod_sparse.rules.options import one_of
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector


class ARTopK(Fused):
    """Selects the k largest magnitudes on one rank, and nothing on the others.

    With the collective ``union``, the one rank's positions reach all ranks, and the values of all ranks at these
    positions are summed.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """Options of ARTopK.

        Attributes:
            leader: The rank that selects: each in "turn", or the one whose k largest entries have the largest "norm",
                for which all ranks select.
        """

        leader: str = one_of("turn", "turn", "norm")

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move the k largest magnitudes out of the accumulator on the rank that leads."""
        rank, ranks = self._context.rank, self._context.ranks
        if self._options.leader == "turn":
            leads = step.number % ranks == rank
            return accumulator.take_largest(k if leads else 0, self._threads)
        vector = accumulator.take_largest(k, self._threads)
        squares = np.zeros(ranks)
        squares[rank] = kernels_for(vector.values).square_norm([(0, vector.values)])
        if np.argmax(self._context.consensus(squares)) == rank:
            return vector
        accumulator.put_back(vector)
        return vector.nothing()
