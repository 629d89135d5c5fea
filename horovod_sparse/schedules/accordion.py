"""Accordion: a high density while gradients change, a low one in between (Agarwal et al., MLSys 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.rules import Place, Step
from horovod_sparse.rules.options import number, whole
from horovod_sparse.schedules.constant import Constant


class Accordion(Constant):
    """Compares the gradients' norm with that of the interval before: a large change asks for the high density.

    So does a learning rate that fell by as much. The norm is the root of the mean square over an interval's steps and
    over the ranks. The first interval has nothing to be compared with, and the high density.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Constant.Options):
        """Options of Accordion; the density configured is the low one.

        Attributes:
            high_density: The high one.
            interval: Epochs from one decision to the next.
            change: Relative change of the norm, or fall of the learning rate, above which the density is high.
            steps_per_epoch: So many steps count as an epoch; None: ``optimizer.set_epoch`` tells epochs.
        """

        high_density: float = number(0.1, lambda x: 0 < x <= 1, "in (0, 1]")
        interval: int = whole(10, least=1)
        change: float = number(0.5, lambda x: x > 0, "above 0", hint="0.5 stands for half of the norm before")
        steps_per_epoch: int | None = whole(None, least=1, hint="without it, optimizer.set_epoch() tells epochs")

    def __init__(self, place: Place, density: float, options: Options) -> None:
        super().__init__(place, density, options)
        if density > options.high_density:
            raise ValueError(f"high_density must be at least density ({density}), not {options.high_density}")
        self._number = 0  # of the interval
        self._squares, self._steps = 0.0, 0  # of the interval so far, on this rank
        self._norm = math.nan  # of the interval before
        self._learning_rate = math.nan  # at its end
        self._high = True

    def _densities(self, step: Step) -> Sequence[float]:
        number = step.epochs(self._options.steps_per_epoch) // self._options.interval
        if number != self._number and self._steps > 0:
            self._decide(step)
        self._number = number
        self._squares += step.square_norm()
        self._steps += 1
        return (self._options.high_density,) if self._high else super()._densities(step)

    def _decide(self, step: Step) -> None:
        rate, change = step.learning_rate, self._options.change
        fell_here = float(rate < (1 - change) * self._learning_rate)
        # A rank that takes part in `hvd.join()` does not know the rate that the others have.
        square, fell = self._place.mean([self._squares / self._steps, fell_here])
        norm = math.sqrt(square)
        # Comparisons with NaN, what there was before the first interval, are false.
        steady = abs(self._norm - norm) <= change * self._norm
        self._high = not steady or fell > 0
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
