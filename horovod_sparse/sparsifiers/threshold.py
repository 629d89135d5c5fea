"""A fixed threshold: every magnitude that reaches it travels (Strom 2015)."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.rules.options import number
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector


class Threshold(Fused):
    """Takes every magnitude of at least a given one; how many these are follows from the gradients, not from k."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """Options of Threshold.

        Attributes:
            threshold: The smallest magnitude that is sent, in units of the gradients; must be given.
        """

        threshold: float | None = number(
            None,
            lambda x: x > 0,
            "a finite number above 0",
            hint="give the option threshold, the smallest magnitude that is to be sent",
            required=True,
        )

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Moves all that reach the threshold out of the accumulator."""
        del k, step
        return accumulator.take_above(float(self._options.threshold), self._threads)
