"""What a schedule may look at when it decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of one bucket, before its gradients are added up.

    Attributes:
        step: Steps of this bucket so far.
        epoch: What ``optimizer.set_epoch`` was told last; None before the first time.
        learning_rate: Of the bucket's param group.
        square_norm: Computes the sum of squares of this rank's gradients; a pass over them.
        mean: Averages numbers over the ranks, with the same bits on all of them; a collective call.
    """

    step: int
    epoch: int | None
    learning_rate: float
    square_norm: Callable[[], float]
    mean: Callable[[Sequence[float]], list[float]]

    def epochs(self, steps_per_epoch: int | None) -> int:
        """Epochs that have ended, by the number of steps or, for None, as the training script told.

        Raises:
            RuntimeError: The script told nothing.
        """
        if steps_per_epoch is not None:
            return self.step // steps_per_epoch
        if self.epoch is None:
            raise RuntimeError(
                "the density depends on the epoch, which is not known: call optimizer.set_epoch(epoch) at the start "
                "of every epoch, or give the compression steps_per_epoch"
            )
        return self.epoch


def check_steps_per_epoch(steps_per_epoch: int | None) -> None:
    """ValueError unless it is None or at least 1."""
    if steps_per_epoch is not None and steps_per_epoch < 1:
        raise ValueError(
            f"steps_per_epoch must be at least 1, not {steps_per_epoch}; without it, optimizer.set_epoch() tells epochs"
        )
