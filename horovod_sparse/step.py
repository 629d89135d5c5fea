"""What the optimizer knows about a step in progress."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """The conditions under which one bucket's gradients were computed.

    Attributes:
        learning_rate: Of the bucket's param group.
        loss_scale: Factor that a GradScaler put on the loss, and so on the gradients.
        epoch: What ``optimizer.set_epoch`` was told last; None before the first time.
        idle: This rank had no backward pass in this step.
    """

    learning_rate: float = 1.0
    loss_scale: float = 1.0
    epoch: int | None = None
    idle: bool = False

    @property
    def unit(self) -> float:
        """What these gradients are multiplied by to become an update."""
        return self.learning_rate / self.loss_scale
