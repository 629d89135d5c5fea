"""Momentum correction: momentum is applied before selection (Lin et al., "Deep Gradient Compression", ICLR 2018)."""

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
    """u = m u + g and v = v + u; v is the residual that is selected from.

    With Nesterov's momentum, v = v + g + m u. In a step with a momentum of 0, v = v + g, and u stays as it is.

    The momentum is that of the optimizer which it serves, as it is in each step, or a constant of its own; the
    optimizer applies none then. v is rescaled as every residual. u is a gradient, as in torch's SGD: it follows the
    loss scale, but not the learning rate.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of momentum correction.

        Attributes:
            momentum: m, in [0, 1), for an optimizer without momentum; None: the optimizer's own is taken over, with
                Nesterov's form and dampening.
            nesterov: Nesterov's momentum, where the momentum is given here.
            masking: Clear u where v was selected and sent (factor masking), so that old directions are not followed for
                long. What travels whole does not wait: there u stays.
            max_norm: Whoever hands gradients in clips this rank's whole gradient, without the loss scale, to a norm of
                max_norm / sqrt(P); None: it is not clipped.
        """

        momentum: float | None = number(None, lambda x: 0 <= x < 1, "in [0, 1)", hint="None is the optimizer's own")
        nesterov: bool = flag(False)
        masking: bool = flag(False)
        max_norm: float | None = number(None, lambda x: x > 0, "above 0", hint="None does not clip")

        def __post_init__(self) -> None:
            """Checks that Nesterov's form belongs to a momentum."""
            super().__post_init__()
            if self.nesterov and self.momentum is None:
                raise ValueError(
                    "nesterov must be False, not True, where the optimizer's momentum is taken over: give the "
                    "optimizer nesterov=True, or the compression momentum=0.9, too"
                )

        @property
        def own(self) -> Momentum | None:
            """The momentum that is given here; None: it is the optimizer's."""
            return None if self.momentum is None else Momentum(self.momentum, self.nesterov)

        def clip(self, norm: float, ranks: int) -> float:
            """Factor on a rank's whole gradient of this norm; 1 where it is small enough, or not finite."""
            most = math.inf if self.max_norm is None else self.max_norm / math.sqrt(ranks)
            return most / norm if most < norm < math.inf else 1.0

    replaces_momentum = True

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(replace(context, undoable=False), options)  # the velocity changes in place: both are copied
        self._own, self._masking = options.own, options.masking
        self._velocity = np.zeros_like(self._residual)

    def open(self, step: Step, scale: float) -> Accumulator:
        """Leaves u pending, which changes when it is added up."""
        if step.carry != 1:
            self._velocity *= self._velocity.dtype.type(step.carry)
        momentum = self._own or step.momentum
        if not momentum.factor:
            return super().open(step, scale)
        share = momentum.share if step.number else momentum.first
        velocity = Velocity(self._velocity, momentum.factor, share, momentum.nesterov)
        return Accumulator(self._residual, step.gradients, scale, clear=step.clear, velocity=velocity)

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
        require_fit(state["velocity"], self._velocity)
        super().load_state_dict(state)
        self._velocity[...] = to_device(state["velocity"], self._velocity)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Both add up: u and v of several ranks together are what one rank with all their gradients would have."""
        return {**super().merge(states), "velocity": total([state["velocity"] for state in states], self._velocity)}
