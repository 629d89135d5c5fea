"""Schedules choose the density of each step; one file per rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from horovod_sparse.rules import BucketContext, Stateful, Step
from horovod_sparse.rules.registry import Registry
from horovod_sparse.schedules.accordion import Accordion
from horovod_sparse.schedules.annealed import Annealed
from horovod_sparse.schedules.constant import Constant
from horovod_sparse.schedules.gravac import GraVAC
from horovod_sparse.schedules.measured import Measured
from horovod_sparse.schedules.warmup import WarmUp


class Schedule(Stateful, Protocol):
    """Density of one bucket over time, built from the bucket's context, the configured density and the rule's options.

    All ranks make the same decisions, based on the step or on numbers that are averaged over the ranks.

    Attributes:
        Options: Nested dataclass of the schedule's options.
        wire_of_all: Format to which values are rounded in steps in which its density is 1, with error feedback; None:
            not rounded. It may change with each call of ``densities``.
        weighs: Whether ``densities`` may return several candidates.
        predictable: Whether the density depends neither on the epoch nor on the gradients of the step, so that a step
            may begin before the ranks have agreed on its epoch and on the elements that take part.
    """

    wire_of_all: str | None
    weighs: bool
    predictable: bool

    def __init__(self, context: BucketContext, density: float, options: Any) -> None: ...

    def densities(self, step: Step) -> Sequence[float]:
        """Return the candidate densities of this step, descending; a single one unless ``weighs``. 1 sends everything.

        Called once in every step, except in those that are skipped because of gradients that are not finite.
        """

    def choose(self, squares: Sequence[float], rest: Callable[[], float]) -> tuple[int | None, Sequence[float]]:
        """Choose between several candidates, once the entries of each are known on this rank.

        Args:
            squares: Squared norm of the entries of each candidate.
            rest: Returns the squared norm of what the first candidate does not send, in a pass over it.

        Returns:
            The index of the candidate to send, or None for everything, and the gains that the choice is based on.
        """


SCHEDULES = Registry("schedule", Schedule, [Constant, WarmUp, Annealed, Measured, GraVAC, Accordion])

__all__ = ["SCHEDULES", "Accordion", "Annealed", "Constant", "GraVAC", "Measured", "Schedule", "WarmUp"]
