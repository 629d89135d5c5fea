"""Fixed threshold: sends every magnitude that reaches it (Strom 2015)."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.rules.options import number
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector


class Threshold(Fused):
    """Selects every magnitude of at least a fixed threshold; their number depends on the gradients, not on k."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """Options of Threshold.

        Attributes:
            threshold: Smallest magnitude that is sent, in units of the gradients; required.
        """

        threshold: float | None = number(
            None,
            above=0,
            hint="give the option threshold, the smallest magnitude to send",
            required=True,
        )

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move all entries that reach the threshold out of the accumulator."""
        del k, step
        return accumulator.take_above(float(self._options.threshold), self._threads)
