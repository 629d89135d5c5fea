"""No error feedback: drops what is not sent. A baseline that shows why error feedback is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels.scratch import SCRATCH
from horovod_sparse.rules import BucketContext, Stateless, Step
from horovod_sparse.rules.options import RuleOptions
from horovod_sparse.vector import SparseVector


class NoMemory(Stateless):
    """No error feedback; needs only a scratch buffer for the selection."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """No options."""

        keeps_nothing = True
        elementwise = True

    replaces_momentum = False

    def __init__(self, context: BucketContext, options: Options) -> None:
        del options
        self._context = context

    def open(self, step: Step, scale: float) -> Accumulator:
        """Accumulate the gradients only; scale 0 ignores the buffer's old content."""
        del scale
        buffer = SCRATCH.empty(self._context.size, self._context.like)
        return Accumulator(buffer, step.gradients, scale=0.0, clear=step.clear)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Drop the entries that were not sent or were returned."""
        del accumulator, vector, returned

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the empty state."""
        del states
        return {}
