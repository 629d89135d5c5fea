"""The same density in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.rules import BucketContext, Stateless, Step
from horovod_sparse.rules.options import RuleOptions, integer


class Constant(Stateless):
    """Always uses the configured density; base class of the other schedules."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of every schedule.

        Attributes:
            dense_steps: Number of steps at the start that send everything, and round nothing.
        """

        dense_steps: int = integer(0)

    wire_of_all: str | None = None
    weighs = False
    predictable = True

    def __init__(self, context: BucketContext, density: float, options: Any) -> None:
        self._context = context
        self._density = density
        self._options = options

    def densities(self, step: Step) -> Sequence[float]:
        """Return 1 during the dense steps at the start, and the densities of the rule afterwards."""
        densities = self._densities(step)
        return (1.0,) if step.number < self._options.dense_steps else densities

    def _densities(self, step: Step) -> Sequence[float]:
        del step
        return (self._density,)

    def choose(self, squares: Sequence[float], rest: Callable[[], float]) -> tuple[int | None, Sequence[float]]:
        """Return the only candidate."""
        del squares, rest
        return 0, ()
