"""Momentum correction: applies momentum before selection (Lin et al., "Deep Gradient Compression", ICLR 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import to_device
from horovod_sparse.kernels.types import Velocity
from horovod_sparse.memories.base import delivered, require_fit, total
from horovod_sparse.memories.residual import Residual
from horovod_sparse.rules import BucketContext, Momentum, Step
from horovod_sparse.rules.options import RuleOptions, flag, number
from horovod_sparse.vector import SparseVector


class MomentumCorrection(Residual):
    """Momentum correction: u = m u + g and v = v + u, where u is the velocity and v the residual.

    Entries are selected from v. In general, v = v + weight u + fresh g with weight = 1 - fresh (1 - m): fresh = 1 is
    Nesterov momentum. In a step with momentum 0, v = v + g, and u is unchanged.

    m is the wrapped optimizer's current momentum or a constant from the options; in both cases the optimizer applies no
    momentum. v is rescaled like every residual. u is a gradient, as in torch's SGD: it is rescaled with the loss scale,
    but not with the learning rate.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of momentum correction.

        Attributes:
            momentum: m, in [0, 1), for an optimizer without momentum; None: the optimizer's momentum, including
                ``nesterov`` and ``dampening``.
            fresh: Weight of the newest gradient, at most 1 / (1 - m): 0 for heavy-ball momentum, 1 for Nesterov's, more
                for less memory; None: as the optimizer, or 0 with ``momentum``.
            masking: Clear u where v was selected and delivered (factor masking), so that old directions fade sooner. u
                is kept in dense steps, where no entry is delayed.
            max_norm: Front ends clip this rank's gradient of all parameters, without the loss scale, to a norm of
                max_norm / sqrt(P); None: no clipping.
        """

        momentum: float | None = number(None, lambda x: 0 <= x < 1, "in [0, 1)", hint="None uses the optimizer's")
        fresh: float | None = number(None, lambda x: x >= 0, "at least 0", hint="None leaves it to the optimizer")
        masking: bool = flag(False)
        max_norm: float | None = number(None, lambda x: x > 0, "above 0", hint="None disables clipping")

        @property
        def own(self) -> Momentum | None:
            """The momentum that these options set; None: the optimizer's is used."""
            return None if self.momentum is None else Momentum(self.momentum, self.fresh or 0.0)

        def clip(self, norm: float, ranks: int) -> float:
            """Return the factor that clips a rank's gradient of this norm; 1 if it is small enough or not finite."""
            most = math.inf if self.max_norm is None else self.max_norm / math.sqrt(ranks)
            return most / norm if most < norm < math.inf else 1.0

    replaces_momentum = True

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(replace(context, undoable=False), options)  # u changes in place, so an undo needs copies
        self._own, self._fresh, self._masking = options.own, options.fresh, options.masking
        self._velocity = np.zeros_like(self._residual)

    def open(self, step: Step, scale: float) -> Accumulator:
        """Start a step; u is updated when the accumulator is summed."""
        if step.carry != 1:
            self._velocity *= self._velocity.dtype.type(step.carry)
        momentum = self._own or step.momentum
        if not momentum.factor:
            return super().open(step, scale)
        share = momentum.share if step.number else momentum.first
        if self._fresh is not None:
            momentum = replace(momentum, fresh=min(self._fresh, 1 / (1 - momentum.factor)))
        velocity = Velocity(self._velocity, momentum.factor, share, momentum.fresh * share, momentum.weight)
        return Accumulator(self._residual, step.gradients, scale, clear=step.clear, velocity=velocity)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Add the returned entries to v; with masking, clear u at the delivered positions."""
        super().close(accumulator, vector, returned)
        if self._masking and vector.indices is not None:
            self._velocity[delivered(accumulator, vector, returned)] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the residual v and the velocity u, not copied."""
        return {**super().state_dict(), "velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy both into place; ValueError if their size or dtype differs."""
        require_fit(state["velocity"], self._velocity)
        super().load_state_dict(state)
        self._velocity[...] = to_device(state["velocity"], self._velocity)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Add up u and v over the states: the sums are what one rank with all gradients would hold."""
        return {**super().merge(states), "velocity": total([state["velocity"] for state in states], self._velocity)}
