"""Error feedback: adds what is not sent to the next gradient (Stich et al. 2018, EF-SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import to_device
from horovod_sparse.memories.base import require_fit, total
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import RuleOptions, number
from horovod_sparse.vector import SparseVector


class Residual:
    """Full residual: acc = g + decay e and e' = acc - sent, in one buffer of the bucket's size, or two if undoable.

    Attributes:
        alternates: Whether a step leaves the arrays of the previous state unchanged.
        empty: Whether the residual is known to be zero.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of the residual.

        Attributes:
            decay: Share of the residual that a step keeps, in (0, 1]. Below 1, what waits is lost over time.
        """

        elementwise = True

        decay: float = number(1.0, above=0, most=1, hint="1 loses nothing")

    replaces_momentum = False

    def __init__(self, context: BucketContext, options: Any) -> None:
        # Rules that are derived from this one have options of their own, and lose nothing.
        self._decay = options.decay if isinstance(options, Residual.Options) else 1.0
        self.alternates = context.undoable
        self._residual = context.zeros()
        self.empty = True
        self._in_place = True  # whether the step in progress changes the residual itself
        # The residual before the last step. The next step writes into it, so that nothing has to be copied.
        self._other = context.zeros() if self.alternates else None

    def open(self, step: Step, scale: float) -> Accumulator:
        """Accumulate in place on the residual, or into the second buffer; nothing is copied."""
        self._in_place = self._other is None or step.resumes  # the other one is from before the first exchange
        if not step.resumes:
            scale *= self._decay
        if self._other is None or self._in_place:
            return Accumulator(self._residual, step.gradients, scale, clear=step.clear, empty=self.empty)
        return Accumulator(self._other, step.gradients, scale, source=self._residual, clear=step.clear)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Add the returned entries; those that were not selected are already in place."""
        accumulator.settle()
        accumulator.put_back(returned)
        everything = vector.indices is None and not len(returned)
        self.empty = everything and (self.empty or accumulator.active_size == accumulator.size)
        if not self._in_place:
            self._swap()

    def _swap(self) -> None:
        if self._other is not None:
            self._residual, self._other = self._other, self._residual

    def state_dict(self) -> dict[str, Any]:
        """Return the residual, not copied."""
        return {"residual": self._residual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy the residual into place; ValueError if its size or dtype differs."""
        if state["residual"] is self._other:  # undoes the last step
            self._swap()
        else:
            require_fit(state["residual"], self._residual)
            self._residual[...] = to_device(state["residual"], self._residual)
            self.empty = False

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Add up the residuals."""
        return {"residual": total([state["residual"] for state in states], self._residual)}
