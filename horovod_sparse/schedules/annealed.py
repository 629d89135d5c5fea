"""Annealing: the density falls with the learning rate, as a delay matters less when the rate is low."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import integer, number
from horovod_sparse.rules.states import checked_number
from horovod_sparse.schedules.constant import Constant


class Annealed(Constant):
    """Uses density * max(floor, rate / highest rate so far), so that a warm-up of the rate has the full density."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Constant.Options):
        """Options of annealing.

        Attributes:
            floor: Smallest factor on the density, in (0, 1].
            interval: Steps between readings of the learning rate; each costs a message per bucket.
        """

        floor: float = number(0.2, above=0, most=1)
        interval: int = integer(20, least=1)

    def __init__(self, context: BucketContext, density: float, options: Options) -> None:
        super().__init__(context, density, options)
        self._highest = 0.0
        self._factor = 1.0

    def _densities(self, step: Step) -> Sequence[float]:
        if step.number % self._options.interval == 0:
            # The mean, as a rank in `hvd.join()` may have another one.
            rate = self._context.mean([step.learning_rate])[0]
            self._highest = max(self._highest, rate)
            self._factor = max(self._options.floor, rate / self._highest) if self._highest else 1.0
        return (self._density * self._factor,)

    def state_dict(self) -> dict[str, Any]:
        """Return the highest learning rate so far, and the factor in use."""
        return {"highest": self._highest, "factor": self._factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load both."""
        highest = checked_number(state["highest"], "highest", finite=True)
        self._factor = checked_number(state["factor"], "factor", self._options.floor, finite=True)
        self._highest = highest
