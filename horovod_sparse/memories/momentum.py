"""Momentum correction: momentum is applied before selection (Lin et al., "Deep Gradient Compression", ICLR 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import kernels_for, to_device
from horovod_sparse.memories.base import delivered, total
from horovod_sparse.memories.residual import Residual
from horovod_sparse.rules import Place, Step
from horovod_sparse.rules.options import RuleOptions, flag, number
from horovod_sparse.vector import SparseVector


class MomentumCorrection(Residual):
    """u = m u + g and v = v + u; v is the residual that is selected from.

    With Nesterov's momentum, u = m (u + g) and v = v + u + g.

    The optimizer that it serves must have no momentum of its own. v is rescaled as every residual. u is a gradient, as
    in torch's SGD: it follows the loss scale, but not the learning rate.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of momentum correction.

        Attributes:
            momentum: m, in [0, 1).
            nesterov: Nesterov's momentum.
            masking: Clear u where v was selected and sent (factor masking), so that old directions are not followed for
                long. What travels whole does not wait: there u stays.
            max_norm: Whoever hands gradients in clips this rank's whole gradient, without the loss scale, to a norm of
                max_norm / sqrt(P); None: it is not clipped.
        """

        momentum: float = number(0.9, lambda x: 0 <= x < 1, "in [0, 1)")
        nesterov: bool = flag(False)
        masking: bool = flag(True)
        max_norm: float | None = number(None, lambda x: x > 0, "above 0", hint="None does not clip")

        def clip(self, norm: float, ranks: int) -> float:
            """Factor on a rank's whole gradient of this norm; 1 where it is small enough, or not finite."""
            most = math.inf if self.max_norm is None else self.max_norm / math.sqrt(ranks)
            return most / norm if most < norm < math.inf else 1.0

    replaces_momentum = True

    def __init__(self, place: Place, options: Options) -> None:
        super().__init__(replace(place, undoable=False), options)  # the velocity changes in place: both are copied
        self._momentum, self._nesterov, self._masking = options.momentum, options.nesterov, options.masking
        self._velocity = np.zeros_like(self._residual)

    def open(self, step: Step, scale: float) -> Accumulator:
        """Updates u; what is pending is u itself."""
        gradients = step.gradients
        if step.carry != 1:
            self._velocity *= self._velocity.dtype.type(step.carry)
        pending = [(start, self._velocity[start : start + gradient.size]) for start, gradient in gradients]
        kernels = kernels_for(self._residual)
        if self._nesterov:
            kernels.accumulate(gradients, self._velocity)
            kernels.accumulate(gradients, self._residual, scale)
            scale = 1.0
        for (_, part), (_, gradient) in zip(pending, gradients, strict=True):
            if self._nesterov:
                part *= part.dtype.type(self._momentum)
            else:
                kernels.accumulate([(0, gradient)], part, self._momentum)
        return Accumulator(self._residual, pending, scale)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Adds to v what came back, and clears u where something was selected and delivered."""
        super().close(accumulator, vector, returned)
        if self._masking and vector.indices is not None:
            self._velocity[delivered(accumulator, vector, returned)] = 0

    def state_dict(self) -> dict[str, Any]:
        """The residual v and the velocity u themselves, not copies."""
        return {**super().state_dict(), "velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies both in; ValueError when they are of another size or dtype."""
        super().load_state_dict(state)
        self._velocity[...] = to_device(state["velocity"], self._velocity)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Both add up: u and v of several ranks together are what one rank with all their gradients would have."""
        return {**super().merge(states), "velocity": total([state["velocity"] for state in states], self._velocity)}
