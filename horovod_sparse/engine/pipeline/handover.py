"""Handover of velocities to an optimizer that applies its own momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from horovod_sparse.kernels import to_device
from horovod_sparse.rules import BucketContext, Momentum, SparseVector
from horovod_sparse.rules.states import checked_flag, require_positions


class Handover:
    """Turns delivered velocities into gradients from which the optimizer's own momentum reproduces them.

    A memory that applies momentum before the selection delivers velocities D. The optimizer computes B <- m B + share *
    gradient. The *effective gradient* (D - m D') / share, where D' was delivered in the step before, takes the buffer B
    from D' to D. Anything else in B (momentum of the weight decay, of dense steps or of a loaded state) decays by m, as
    it should. In dense steps D = 0, and the plain gradient is added.

    All values are sums over the ranks, as in the exchange.

    Attributes:
        plain: Whether the optimizer last got plain gradients, as in a dense step.
        switched: Whether it got the other kind in the step before.
        held: What the optimizer's buffer holds of the delivered velocities after the last step, D.
        before: What it held before that step, D'.
    """

    def __init__(self, context: BucketContext) -> None:
        self.held = self._nothing = SparseVector.empty(context.size, context.like)
        self.before = self._nothing
        self.plain, self.switched = True, False

    def rescale(self, factor: float) -> None:
        """Multiply what the buffer holds, after a change of the loss scale."""
        if factor != 1:
            self.held = _times(self.held, factor)

    def gradient(self, total: SparseVector, momentum: Momentum, dense: bool) -> SparseVector:
        """Return the gradient for the optimizer.

        Args:
            total: Delivered velocities, or plain gradients in a dense step.
            momentum: The optimizer's momentum in this step.
            dense: Whether it is a dense step.
        """
        if not momentum.factor:  # the optimizer's buffer stays as it is
            self.before, self.switched = self._nothing, False
            return total
        self.before, self.held = self.held, self._nothing if dense else total
        self.plain, self.switched = dense, dense != self.plain
        if dense:
            return total.plus(_times(self.before, -momentum.factor / momentum.share))
        effective = total.plus(_times(self.before, -momentum.factor))
        return effective if momentum.share == 1 else _times(effective, 1 / momentum.share)

    def forget(self) -> None:
        """Note that the optimizer's buffer has been replaced, and holds nothing of what was delivered."""
        self.held, self.plain = self._nothing, True

    def state_dict(self) -> dict[str, Any]:
        """Return ``held`` and ``plain``; a vector of all positions is stored without indices."""
        indices = self._nothing.indices if self.held.indices is None else self.held.indices
        return {"indices": indices, "values": self.held.values, "plain": self.plain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from ``state_dict``; ValueError if it does not fit the bucket."""
        size = self.held.size
        indices, values = (to_device(state[name], self._nothing.values) for name in ("indices", "values"))
        full = values.size == size and not indices.size
        if not full:
            if indices.size != values.size:
                raise ValueError(f"{indices.size} indices do not fit {values.size} values")
            require_positions(indices, size, "indices of velocities")
        self.plain = checked_flag(state["plain"], "plain")
        self.held = SparseVector(None if full else indices, values, size)


def _times(vector: SparseVector, factor: float) -> SparseVector:
    return replace(vector, values=vector.values * vector.values.dtype.type(factor))
