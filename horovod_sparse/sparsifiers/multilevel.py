"""Two-level top-k: compresses, then compresses the result again (GraVAC)."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.rules.options import number
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector


class MultiLevel(Fused):
    """Selects exactly the k largest magnitudes, like TopK, from the result of a first level with a smaller factor."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """Options of MultiLevel.

        Attributes:
            cf_min: Compression factor of the first level; if it leaves fewer than k entries, there is only one level.
        """

        cf_min: float = number(10.0, least=1, hint="10 keeps a tenth of the elements")

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move the k largest magnitudes out of the accumulator, or all if there are fewer than k."""
        del step
        first = int(accumulator.active_size / self._options.cf_min)
        return accumulator.keep_largest(accumulator.take_largest(max(k, first), self._threads), k)
