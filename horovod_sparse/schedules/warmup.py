"""Warm-up: the density begins high and falls exponentially (Lin et al., "Deep Gradient Compression", ICLR 2018)."""

from __future__ import annotations

from collections.abc import Sequence

from horovod_sparse.schedules.constant import Constant
from horovod_sparse.schedules.moment import Moment, check_steps_per_epoch


class WarmUp(Constant):
    """density^((e+1)/(E+1)) in epoch e of E, and the density configured from then on.

    With ``steps_per_epoch=1`` the density falls in every step.

    Args:
        density: After the warm-up.
        warmup: Epochs E.
        warmup_densities: One for each epoch of the warm-up, instead of the formula.
        steps_per_epoch: So many steps count as an epoch; None: ``optimizer.set_epoch`` tells epochs.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        density: float,
        *,
        warmup: int = 4,
        warmup_densities: Sequence[float] | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(density)
        if warmup < 0:
            raise ValueError(f"warmup must be a number of epochs of at least 0, not {warmup}")
        check_steps_per_epoch(steps_per_epoch)
        if warmup_densities is None:
            warmup_densities = [density ** ((epoch + 1) / (warmup + 1)) for epoch in range(warmup)]
        wrong = [one for one in warmup_densities if not 0 < one <= 1]
        if wrong:
            raise ValueError(f"warmup_densities must be in (0, 1], not {wrong[0]}")
        self._densities = tuple(warmup_densities)
        self._steps_per_epoch = steps_per_epoch

    def densities(self, moment: Moment) -> Sequence[float]:
        """The density of the epoch."""
        epoch = moment.epochs(self._steps_per_epoch)
        return (self._densities[epoch],) if epoch < len(self._densities) else super().densities(moment)
