"""Handover of velocities to an optimizer that applies its own momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_sparse.kernels import to_device
from horovod_sparse.rules import BucketContext, Mode, Momentum, SparseVector
from horovod_sparse.rules.states import require_positions


class Handover:
    """Turns delivered velocities into gradients from which the optimizer's own momentum reproduces them.

    A memory that applies momentum before the selection delivers velocities D. The optimizer computes B <- m B + share *
    gradient. The *effective gradient* (D - m D') / share, where D' was delivered in the step before, takes the buffer B
    from D' to D. Anything else in B (momentum of the weight decay, of dense steps or of a loaded state) decays by m, as
    it should. In dense steps D = 0, and the plain gradient is added.

    All values are sums over the ranks, as in the exchange.

    What the buffer holds changes only with a step of the optimizer, which may be skipped: see ``commit``.

    Attributes:
        held: What the optimizer's buffer holds of the delivered velocities, D'.
        next: What it holds after the optimizer's next step, D.
        mode: Mode of the last step that the optimizer has applied with momentum.
        next_mode: Mode of its next step.
    """

    def __init__(self, context: BucketContext) -> None:
        self.held = self.next = self._nothing = SparseVector.empty(context.size, context.like)
        self.mode = self.next_mode = Mode.ALL

    def rescale(self, factor: float) -> None:
        """Multiply what the buffer holds, after a change of the loss scale."""
        self.held = self.held.times(factor)

    def gradient(self, total: SparseVector, momentum: Momentum, mode: Mode, carry: float = 1.0) -> SparseVector:
        """Return the gradient for the optimizer's next step.

        Args:
            total: Delivered velocities, or gradients in a plain mode.
            momentum: The optimizer's momentum in this step.
            mode: Mode of the step.
            carry: Factor that converts what the buffer holds to the unit of this step's totals; unlike ``rescale``, it
                is not remembered, and what the buffer holds after the step is converted back.
        """
        if not (momentum.factor or momentum.averages):  # the optimizer's buffer stays as it is
            self.next, self.next_mode = self.held, self.mode
            return total
        self.next, self.next_mode = self._nothing if mode.plain else total.times(1 / carry), mode
        if mode.plain:
            return total.plus(self.held.times(-momentum.factor * carry / momentum.share))
        return total.plus(self.held.times(-momentum.factor * carry)).times(1 / momentum.share)

    def last_gradient(self, momentum: Momentum) -> SparseVector:
        """Return the last gradient, which the optimizer has not applied; of a dense step, only what was added to it."""
        return self.next.plus(self.held.times(-momentum.factor)).times(1 / momentum.share)

    def commit(self) -> None:
        """Note that the optimizer has applied the last gradient."""
        self.held, self.mode = self.next, self.next_mode

    def drop(self, start: int, end: int) -> None:
        """Record that the optimizer's buffer was cleared at some positions."""
        values, indices = self.held.values.copy(), self.held.indices
        values[slice(start, end) if indices is None else (indices >= start) & (indices < end)] = 0
        self.held = self.next = SparseVector(indices, values, self.held.size)

    def forget(self) -> None:
        """Record that the optimizer's buffer was replaced, and contains no delivered momentum."""
        self.held = self.next = self._nothing
        self.mode = self.next_mode = Mode.ALL

    def state_dict(self) -> dict[str, Any]:
        """Return ``held`` and ``mode``; a vector of all positions is stored without indices."""
        indices = self._nothing.indices if self.held.indices is None else self.held.indices
        return {"indices": indices, "values": self.held.values, "mode": self.mode.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from ``state_dict``; ValueError if it does not fit the bucket."""
        size = self.held.size
        indices, values = (to_device(state[name], self._nothing.values) for name in ("indices", "values"))
        full = values.size == size and not indices.size
        if not full:
            if indices.size != values.size:
                raise ValueError(f"{indices.size} indices do not fit {values.size} values")
            require_positions(indices, size, "indices of velocities")
        self.mode = self.next_mode = Mode(state["mode"])
        self.held = self.next = SparseVector(None if full else indices, values, size)
