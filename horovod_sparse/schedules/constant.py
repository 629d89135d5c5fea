"""The same density in every step."""

from __future__ import annotations

from collections.abc import Sequence

from horovod_sparse.schedules.moment import Moment
from horovod_sparse.state import Stateless


class Constant(Stateless):
    """Always the density that was configured.

    Args:
        density: It.
    """

    weighs = False

    def __init__(self, density: float) -> None:
        self._density = density

    def densities(self, moment: Moment) -> Sequence[float]:
        """The one density."""
        del moment
        return (self._density,)

    def choose(self, gains: Sequence[float], moment: Moment) -> int | None:
        """The one candidate."""
        del gains, moment
        return 0
