"""Warm-up: the density starts high and falls exponentially (Lin et al., "Deep Gradient Compression", ICLR 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import integer, is_number
from horovod_sparse.schedules.constant import Constant


class WarmUp(Constant):
    """Uses density^((e+1)/(E+1)) in warm-up epoch e of E, and the configured density afterwards."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Constant.Options):
        """Options of the warm-up.

        Attributes:
            warmup: Number of warm-up epochs E.
            warmup_densities: Density of each warm-up epoch, instead of the formula and ``warmup``.
            steps_per_epoch: Number of steps that count as an epoch; with 1 the density falls in every step. None:
                ``optimizer.set_epoch`` sets the epoch.
        """

        warmup: int = integer(4)
        warmup_densities: tuple[float, ...] | None = None
        steps_per_epoch: int | None = integer(None, least=1, hint="leave it out to use optimizer.set_epoch()")

        def __post_init__(self) -> None:
            """Check the fields and the densities."""
            super().__post_init__()
            densities: Any = self.warmup_densities
            if densities is not None:
                if not isinstance(densities, (list, tuple)) or not all(is_number(x) and 0 < x <= 1 for x in densities):
                    raise ValueError(f"warmup_densities must be numbers in (0, 1], as in (0.3,0.1), not {densities!r}")
                object.__setattr__(self, "warmup_densities", tuple(densities))

    predictable = False

    def __init__(self, context: BucketContext, density: float, options: Options) -> None:
        super().__init__(context, density, options)
        epochs = options.warmup
        formula = tuple(density ** ((epoch + 1) / (epochs + 1)) for epoch in range(epochs))
        self._first = formula if options.warmup_densities is None else options.warmup_densities

    def _densities(self, step: Step) -> Sequence[float]:
        epoch = step.epochs(self._options.steps_per_epoch)
        return (self._first[epoch],) if epoch < len(self._first) else super()._densities(step)
