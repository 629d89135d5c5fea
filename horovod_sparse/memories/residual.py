"""Error feedback: what is not sent is added to the next gradient (Stich et al. 2018, EF-SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import to_device
from horovod_sparse.memories.base import require_fit, total
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import RuleOptions
from horovod_sparse.vector import SparseVector


class Residual:
    """Keeps the whole rest: e' = acc - sent, one buffer of the bucket's size; a second one where steps may be undone.

    Args:
        context: The bucket and the rank.
        options: Of the memory.

    Attributes:
        alternates: Tells that a step leaves the arrays of the state before it as they are.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of the residual: none."""

    replaces_momentum = False

    def __init__(self, context: BucketContext, options: Any) -> None:
        del options
        self.alternates = context.undoable
        self._residual = np.zeros(context.size, context.like.dtype, like=context.like)
        # Of the step before the last; a step writes into it, so that nothing has to be copied.
        self._other = np.zeros_like(self._residual) if self.alternates else None

    def open(self, step: Step, scale: float) -> Accumulator:
        """The accumulator works in place on the residual, or writes into the other buffer: nothing is copied."""
        if self._other is None:
            return Accumulator(self._residual, step.gradients, scale, clear=step.clear)
        return Accumulator(self._other, step.gradients, scale, source=self._residual, clear=step.clear)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Adds what came back from the exchange; what was not taken is in place already."""
        del vector
        accumulator.settle()
        accumulator.put_back(returned)
        self._swap()

    def _swap(self) -> None:
        if self._other is not None:
            self._residual, self._other = self._other, self._residual

    def state_dict(self) -> dict[str, Any]:
        """The residual itself, not a copy."""
        return {"residual": self._residual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies the residual in; ValueError when it is of another size or dtype."""
        if state["residual"] is self._other:  # the last step is undone
            self._swap()
        else:
            require_fit(state["residual"], self._residual)
            self._residual[...] = to_device(state["residual"], self._residual)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Residuals add up."""
        return {"residual": total([state["residual"] for state in states], self._residual)}
