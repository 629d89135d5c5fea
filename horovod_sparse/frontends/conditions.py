"""Conditions of a step, read from the optimizers of a front end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.frontends.moments import momentum_of
from horovod_sparse.frontends.units import ResidualUnits
from horovod_sparse.rules import Momentum, Step


class FrontEnd(Protocol):
    """The part of a front end that an exchange depends on."""

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """The param groups of all optimizers, in order."""
        ...

    def optimizer_of(self, group: int) -> torch.optim.Optimizer:
        """Return the optimizer that a param group belongs to."""
        ...

    def place_named(self, names: Sequence[str]) -> None:
        """Create a bucket for the parameters of these names, if they are known and have none; a collective call."""
        ...


class Conditions:
    """The ``Owner`` of an exchange: conditions come from a front end's param groups.

    Args:
        front_end: The front end, or a weak proxy of it.
        sparse: The configuration.
        residual_unit: "update" or "gradient"; None: by the class of each optimizer.
        rank: This rank.
    """

    def __init__(self, front_end: FrontEnd, sparse: Sparse, residual_unit: str | None, rank: int) -> None:
        self._front_end = front_end
        self._takes_momentum_over = sparse.takes_momentum_over
        self._units = ResidualUnits(residual_unit, rank)

    def step_for(self, group: int) -> Step:
        """Return learning rate, momentum and unit of the residuals for a param group; the defaults for group -1."""
        settings = self._front_end.param_groups[group] if group >= 0 else {}
        if "lr" not in settings:
            return Step()
        rate, optimizer = float(settings["lr"]), self._front_end.optimizer_of(group)
        self._units.note(optimizer, group, rate)
        return Step(
            rate,
            scale_free=self._units.scale_free(optimizer),
            momentum=momentum_of(optimizer, settings) if self._takes_momentum_over else Momentum(),
        )

    def place_named(self, names: Sequence[str]) -> None:
        """Create a bucket for the parameters of these names; a collective call."""
        self._front_end.place_named(names)
