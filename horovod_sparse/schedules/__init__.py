"""Schedules choose the density of each step, one file per rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.registry import Registry
from horovod_sparse.schedules.accordion import Accordion
from horovod_sparse.schedules.constant import Constant
from horovod_sparse.schedules.gravac import GraVAC
from horovod_sparse.schedules.warmup import WarmUp


class Schedule(Protocol):
    """One bucket's density over time; built from its place, the configuration's density and its options.

    All ranks decide alike: by the step, or by numbers that are averaged over the ranks.

    Attributes:
        Options: Nested dataclass of its options.
        weighs: Tells that it gives several candidates.
    """

    weighs: bool

    def __init__(self, context: BucketContext, density: float, options: Any) -> None: ...

    def densities(self, step: Step) -> Sequence[float]:
        """The candidates of this step, descending; one only if the schedule does not weigh. 1: everything.

        Called once in every step that is not refused for a gradient that is not finite.
        """
        ...

    def choose(self, squares: Sequence[float], rest: Callable[[], float]) -> tuple[int | None, Sequence[float]]:
        """The choice between several candidates, once the entries of each are known on this rank.

        Args:
            squares: For each candidate the squared norm of its entries.
            rest: Gives that of all that the first one leaves behind; a pass over it.

        Returns:
            The number of the candidate that is sent, None for everything, and the gains that the choice rests on.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        ...


SCHEDULES = Registry(
    "schedule",
    Schedule,
    {
        "constant": Constant,
        "warmup": WarmUp,
        "gravac": GraVAC,
        "accordion": Accordion,
    },
)

__all__ = ["SCHEDULES", "Accordion", "Constant", "GraVAC", "Schedule", "WarmUp"]
