"""Units of the memory: what its content is worth as an update and as a mean gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from horovod_sparse.rules import Conditions
from horovod_sparse.rules.states import checked_flag, checked_number


class Units(NamedTuple):
    """Factors that convert the memory's content to an update and to a mean gradient.

    Content times unit is an update: the unit is learning rate / loss scale * factor, or 1 / loss scale * factor for a
    scale-free optimizer. A step multiplies the memory by old unit / new unit, so that the update that it holds stays
    the same when one of these changes, or the world size. Both units are remembered: either can continue a state.

    The memory pauses in a step with a learning rate of 0, or so small that rounding would change the content more: it
    keeps content and unit, and what such a step does not send of its gradients is dropped.

    If the optimizer applies momentum to what is delivered, later learning rates multiply it, too. Gradients in the
    memory then must not gain weight when the rate falls: the scale is at most 1, apart from the loss scale, and the old
    unit is the mean of the rates at which the content was computed. Each step replaces a share of it, its density.

    Attributes:
        update: 0: the content is worth no update, as it is of steps with a learning rate of 0.
        gradient: 0: not known yet, as nothing has been in the memory.
        mean: Whether ``update`` is a mean over the gradients in the memory, as momentum is applied to what it delivers.
    """

    update: float = 0.0
    gradient: float = 0.0
    mean: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Return the factors by their names in a pipeline's state."""
        return {"unit": self.update, "gradient_unit": self.gradient, "mean_unit": self.mean}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Units:
        """Return the units in the state of a pipeline; ValueError if one is not valid."""
        update, gradient = (checked_number(state[key], key) for key in ("unit", "gradient_unit"))
        return cls(update, gradient, checked_flag(state["mean_unit"], "mean_unit"))

    def scales(self, conditions: Conditions, factor: float, epsilon: float) -> Scales:
        """Return the factors of a step, whose memory has these units.

        Args:
            conditions: Conditions of the step.
            factor: Factor on the totals.
            epsilon: Relative rounding error of the memory's dtype.
        """
        gradient = factor / conditions.loss_scale
        update = conditions.learning_rate / conditions.loss_scale * factor
        if not (self.gradient and gradient):
            return Scales(Units(update or self.update, gradient))
        carry = self.gradient / gradient
        if conditions.scale_free:
            return Scales(Units(update or self.update, gradient), carry, carry)
        rescale = self.update / update if update else carry
        if conditions.momentum_after:
            memory = min(carry, rescale)
            earlier = self.update / memory if memory else update
            return Scales(Units(update, gradient, mean=True), carry, memory, earlier)
        # As rates, without the loss scale.
        paused = self.update > 0 and update * carry <= self.update * epsilon
        return Scales(self if paused else Units(update, gradient), carry, carry if paused else rescale, paused=paused)


class Scales(NamedTuple):
    """Units of a step, and the factors on gradients of earlier steps and on the memory.

    Attributes:
        units: Units of this step's gradients.
        carry: Factor on gradients of earlier steps.
        memory: Factor on the memory.
        earlier: Unit ``update`` of the memory's content after it was multiplied by ``memory``.
        paused: Whether the memory takes no part, as the step is worth nothing compared to its content.
    """

    units: Units
    carry: float = 1.0
    memory: float = 1.0
    earlier: float = 0.0
    paused: bool = False

    @property
    def kept(self) -> float:
        """Factor on what the optimizer's buffer holds, in this step and later ones."""
        return 1.0 if self.paused else self.carry

    @property
    def once(self) -> float:
        """Factor on what the optimizer's buffer holds, in this step only, as its unit stays that of the memory."""
        return self.carry if self.paused else 1.0

    def after(self, density: float) -> Units:
        """Return the units of the memory after a step that has delivered a share of its content."""
        if not self.units.mean:
            return self.units
        return self.units._replace(update=self.earlier + density * (self.units.update - self.earlier))
