"""Top-k in two levels: compress, then compress the result again (GraVAC)."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.rules.options import number
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector


class MultiLevel(Fused):
    """Takes exactly the k largest magnitudes, as TopK does, out of the largest that a smaller factor leaves."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """Options of MultiLevel.

        Attributes:
            cf_min: Compression factor of the first level; where k is more than it leaves, there is no second one.
        """

        cf_min: float = number(10.0, lambda x: x >= 1, "at least 1", hint="10 leaves a tenth")

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Moves the k largest magnitudes out of the accumulator, or all where there are fewer than k."""
        del step
        first = int(accumulator.active_size / self._options.cf_min)
        return accumulator.keep_largest(accumulator.take_largest(max(k, first), self._threads), k)
