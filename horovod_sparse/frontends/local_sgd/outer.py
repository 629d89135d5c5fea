"""Outer optimizer of local SGD: SGD on the common parameters of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.sgd import sgd


@dataclass(frozen=True)
class OuterSGD:
    """Settings of the outer step, as in ``torch.optim.SGD``; must be the same on every rank.

    The defaults are those of DiLoCo (arXiv 2311.08105). ``OuterSGD(lr=1, momentum=0)`` averages the parameters of the
    ranks, as local SGD and federated averaging do.

    Args:
        lr: Learning rate of the outer step: factor on the mean difference.
        momentum: Momentum of the mean differences over the rounds.
        nesterov: Whether to use Nesterov momentum; without effect if there is no momentum.

    Raises:
        ValueError: A value is out of range.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        """Check the values at construction."""
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr of the outer step must be a number above 0, not {self.lr!r}: 0.7 is DiLoCo's")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum of the outer step must be in [0, 1), not {self.momentum!r}: 0.9 is DiLoCo's")

    def apply(
        self,
        parameters: Sequence[torch.Tensor],
        differences: Sequence[torch.Tensor],
        velocities: Sequence[torch.Tensor],
    ) -> None:
        """Take one step; changes parameters and velocities in place.

        Args:
            parameters: The common parameters.
            differences: Mean differences in the same shapes; used as gradients, so they are subtracted.
            velocities: Momentum buffers in the same shapes; unused without momentum.
        """
        sgd(
            list(parameters),
            list(differences),
            list(velocities) if self.momentum else [None] * len(parameters),
            momentum=self.momentum,
            nesterov=self.nesterov and self.momentum > 0,
            lr=self.lr,
            weight_decay=0.0,
            dampening=0.0,
            maximize=False,
        )


# Where entries are selected, training ended far behind with DiLoCo's outer step (docs/local-steps.md).
MEAN = OuterSGD(lr=1, momentum=0)
