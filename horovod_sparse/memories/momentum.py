"""Momentum correction: applies momentum before selection (Lin et al., "Deep Gradient Compression", ICLR 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import kernels_for, to_device
from horovod_sparse.kernels.types import Velocity
from horovod_sparse.memories.base import delivered, require_fit, total
from horovod_sparse.memories.residual import Residual
from horovod_sparse.rules import BucketContext, Momentum, Step
from horovod_sparse.rules.options import RuleOptions, flag, number
from horovod_sparse.rules.states import checked_flag
from horovod_sparse.vector import SparseVector


class MomentumCorrection(Residual):
    """Momentum correction: u = m u + g and v = v + u, where u is the velocity and v the residual.

    Entries are selected from v. With Nesterov momentum, v = v + g + m u. In a step with momentum 0, v = v + g, and u is
    unchanged. Both are cases of quasi-hyperbolic momentum (Ma and Yarats, ICLR 2019), v = v + (1 - f) u + f / (1 - m)
    g, in which every gradient has the same weight in the long run: f is 0, or 1 - m with Nesterov momentum.

    m is a constant from the options or the wrapped optimizer's current momentum. v is rescaled like every residual. u
    is a gradient, as in torch's SGD: it is rescaled with the loss scale, but not with the learning rate.

    If m is the optimizer's, the memory applies no momentum in dense steps, which delay nothing, and sends gradients. In
    the first dense step after others, these include v and u, converted to gradients that the optimizer's momentum turns
    into the same updates over time; u is then 0.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of momentum correction.

        Attributes:
            momentum: m, in [0, 1), for an optimizer without momentum; None: the optimizer's momentum, including
                ``nesterov`` and ``dampening``.
            nesterov: Use Nesterov momentum; only with ``momentum``.
            fresh: f, in [0, 1]: share of a gradient that bypasses u, in steps that send a selection. None: the form of
                the optimizer or of ``nesterov``, as in dense steps.
            limit: Most that the norm of what a step delivers may exceed the running mean of earlier steps, as a factor;
                the rest is kept. Keeps high learning rates and short warm-ups from diverging. None: no limit.
            masking: Clear u where v was selected and delivered (factor masking), so that old directions fade sooner.
                Dense steps delay no entry, and mask nothing.
            max_norm: Front ends clip this rank's gradient of all parameters, without the loss scale, to a norm of
                max_norm / sqrt(P); None: no clipping.
        """

        elementwise = True

        momentum: float | None = number(None, least=0, below=1, hint="None uses the optimizer's")
        nesterov: bool = flag(False)
        fresh: float | None = number(None, least=0, most=1, hint="None keeps the momentum's form")
        limit: float | None = number(None, above=1, hint="None sets no limit")
        masking: bool = flag(False)
        max_norm: float | None = number(None, above=0, hint="None disables clipping")

        def __post_init__(self) -> None:
            """Check the fields, and that ``nesterov`` comes with ``momentum``."""
            super().__post_init__()
            if self.nesterov and self.momentum is None:
                raise ValueError(
                    "nesterov must be False, not True, where the optimizer's momentum is used: set nesterov=True in "
                    "the optimizer, or also set momentum in the compression"
                )

        @property
        def own(self) -> Momentum | None:
            """The momentum that these options set; None: the optimizer's is used."""
            return None if self.momentum is None else Momentum(self.momentum, self.nesterov)

        def clip(self, norm: float, ranks: int) -> float:
            """Return the factor that clips a rank's gradient of this norm; 1 if it is small enough or not finite."""
            most = math.inf if self.max_norm is None else self.max_norm / math.sqrt(ranks)
            return most / norm if most < norm < math.inf else 1.0

    replaces_momentum = True

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(replace(context, undoable=False), options)  # u changes in place, so an undo needs copies
        self._own, self._fresh, self._masking = options.own, options.fresh, options.masking
        self._velocity = context.zeros()
        self._of_gradients = False  # whether v holds gradients, to which the optimizer applies momentum, not updates

    def open(self, step: Step, scale: float) -> Accumulator:
        """Start a step; u is updated when the accumulator is summed."""
        if step.carry != 1:
            self._velocity *= self._velocity.dtype.type(step.carry)
        momentum = self._own or step.momentum
        if not (momentum.factor or momentum.averages):
            return super().open(step, scale)
        share = momentum.share if step.number else momentum.first
        fresh, weight = (1.0, momentum.factor) if momentum.nesterov else (0.0, 1.0)
        if self._fresh is not None and not (self._own and step.mode.plain):
            fresh, weight = self._fresh / (1 - momentum.factor), 1 - self._fresh
        if self._own is None:
            scale *= self._converted(step.mode.plain, momentum, weight)
            if step.mode.plain:
                return super().open(step, scale)
        if step.resumes:  # u has decayed and was added to v in the exchange before
            for _, gradient in step.gradients:
                gradient *= gradient.dtype.type(share)
            kernels_for(self._velocity).accumulate(step.gradients, self._velocity)
            for _, gradient in step.gradients:
                gradient *= gradient.dtype.type(fresh + weight)
            return Accumulator(self._residual, step.gradients, scale)
        velocity = Velocity(self._velocity, momentum.factor, share, fresh * share, weight)
        return Accumulator(self._residual, step.gradients, scale, clear=step.clear, velocity=velocity)

    def take_back(self, vector: SparseVector) -> None:
        """Add entries to v that were delivered in an exchange that the next one continues."""
        self.empty = False
        kernels_for(self._residual).add(vector.indices, vector.values, self._residual)

    def _converted(self, to_gradients: bool, momentum: Momentum, weight: float) -> float:
        """Convert the memory between gradients and updates; return the factor on v.

        Over time, a gradient x becomes the update share / (1 - m) x, and u the update weight * m / (1 - m) u.
        """
        if to_gradients == self._of_gradients:
            return 1.0
        self._of_gradients = to_gradients
        factor = (1 - momentum.factor) / momentum.share
        if not to_gradients:
            return 1 / factor
        self.empty = False
        self._residual += self._residual.dtype.type(weight * momentum.factor / (1 - momentum.factor)) * self._velocity
        self._velocity[...] = 0
        return factor

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Add the returned entries to v; with masking, clear u at the delivered positions."""
        super().close(accumulator, vector, returned)
        if self._masking and vector.indices is not None:
            self._velocity[delivered(accumulator, vector, returned)] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the residual v and the velocity u, not copied, and what v holds."""
        return {**super().state_dict(), "velocity": self._velocity, "of_gradients": self._of_gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy both into place; ValueError if their size or dtype differs."""
        require_fit(state["velocity"], self._velocity)
        self._of_gradients = checked_flag(state["of_gradients"], "of_gradients")
        super().load_state_dict(state)
        self._velocity[...] = to_device(state["velocity"], self._velocity)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Add up u and v over the states: the sums are what one rank with all gradients would hold."""
        velocity = total([state["velocity"] for state in states], self._velocity)
        # The same on all ranks that have trained together.
        of_gradients = any(state["of_gradients"] for state in states)
        return {**super().merge(states), "velocity": velocity, "of_gradients": of_gradients}
