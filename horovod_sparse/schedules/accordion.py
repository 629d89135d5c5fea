"""Accordion: a high density while gradients change, a low one in between (Agarwal et al., MLSys 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from horovod_sparse.schedules.constant import Constant
from horovod_sparse.schedules.moment import Moment, check_steps_per_epoch


class Accordion(Constant):
    """Compares the gradients' norm with that of the interval before: a large change asks for the high density.

    So does a learning rate that fell by as much. The norm is the root of the mean square over an interval's steps and
    over the ranks. The first interval has nothing to be compared with, and the high density.

    Args:
        density: The low density.
        high_density: The high one.
        interval: Epochs from one decision to the next.
        change: Relative change of the norm, or fall of the learning rate, above which the density is high.
        steps_per_epoch: So many steps count as an epoch; None: ``optimizer.set_epoch`` tells epochs.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        density: float,
        *,
        high_density: float = 0.1,
        interval: int = 10,
        change: float = 0.5,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(density)
        if not density <= high_density <= 1:
            raise ValueError(f"high_density must be at least density ({density}) and at most 1, not {high_density}")
        if interval < 1:
            raise ValueError(f"interval must be at least 1 epoch, not {interval}")
        if not change > 0:
            raise ValueError(f"change must be above 0, not {change}: 0.5 stands for half of the norm before")
        check_steps_per_epoch(steps_per_epoch)
        self._high_density, self._interval, self._change = high_density, interval, change
        self._steps_per_epoch = steps_per_epoch
        self._number = 0  # of the interval
        self._squares, self._steps = 0.0, 0  # of the interval so far, on this rank
        self._norm = math.nan  # of the interval before
        self._learning_rate = math.nan  # at its end
        self._high = True

    def densities(self, moment: Moment) -> Sequence[float]:
        """The density of the interval."""
        number = moment.epochs(self._steps_per_epoch) // self._interval
        if number != self._number and self._steps > 0:
            self._decide(moment)
        self._number = number
        self._squares += moment.square_norm()
        self._steps += 1
        return (self._high_density,) if self._high else super().densities(moment)

    def _decide(self, moment: Moment) -> None:
        (square,) = moment.mean([self._squares / self._steps])
        norm, rate = math.sqrt(square), moment.learning_rate
        # Comparisons with NaN, what there was before the first interval, are false.
        steady = abs(self._norm - norm) <= self._change * self._norm
        fell = rate < (1 - self._change) * self._learning_rate
        self._high = not steady or fell
        self._norm, self._learning_rate = norm, rate
        self._squares, self._steps = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """The interval so far, and what it will be compared with."""
        return {
            "number": self._number,
            "squares": self._squares,
            "steps": self._steps,
            "norm": self._norm,
            "learning_rate": self._learning_rate,
            "high": self._high,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        self._number, self._steps = int(state["number"]), int(state["steps"])
        self._squares, self._norm = float(state["squares"]), float(state["norm"])
        self._learning_rate, self._high = float(state["learning_rate"]), bool(state["high"])
