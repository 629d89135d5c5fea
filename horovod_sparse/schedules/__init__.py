"""Schedules choose the density of each step, one file per rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from horovod_sparse.schedules.accordion import Accordion
from horovod_sparse.schedules.constant import Constant
from horovod_sparse.schedules.gravac import GraVAC
from horovod_sparse.schedules.moment import Moment
from horovod_sparse.schedules.warmup import WarmUp


class Schedule(Protocol):
    """One bucket's density over time; built from the configuration's density and options.

    All ranks decide alike: by the step, or by numbers that are averaged over the ranks.

    Attributes:
        weighs: Whether ``choose`` has to be asked. It costs a pass over what is left after the selection.
    """

    weighs: bool

    def densities(self, moment: Moment) -> Sequence[float]:
        """The candidates of this step, descending; only the first one if the schedule does not weigh."""
        ...

    def choose(self, gains: Sequence[float], moment: Moment) -> int | None:
        """Which candidate is sent; None: everything.

        Args:
            gains: For each candidate the share of the accumulated gradient's squared norm in it, averaged over ranks.
            moment: The step.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        ...


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "warmup": WarmUp,
    "gravac": GraVAC,
    "accordion": Accordion,
}

__all__ = ["SCHEDULES", "Accordion", "Constant", "GraVAC", "Moment", "Schedule", "WarmUp"]
