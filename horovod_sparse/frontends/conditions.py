"""Conditions of a step, read from the optimizers of a front end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.frontends.base import FrontEnd, numbered_group
from horovod_sparse.frontends.momentum import buffers_of, load_buffers
from horovod_sparse.frontends.optimizers import applies_momentum, momentum_of
from horovod_sparse.frontends.units import ResidualUnits
from horovod_sparse.rules import Conditions, Momentum


class ParamGroups:
    """``Owner`` and ``Buffers`` of an exchange, which reads the conditions of a step from the param groups.

    Args:
        front_end: The front end, or a weak proxy of it.
        sparse: The configuration.
        residual_unit: "update" or "gradient"; None: by the class of each optimizer.
        rank: Rank of this process.
    """

    def __init__(self, front_end: FrontEnd, sparse: Sparse, residual_unit: str | None, rank: int) -> None:
        self._front_end = front_end
        self._takes_momentum_over = sparse.takes_momentum_over
        self._units = ResidualUnits(residual_unit, rank)

    def step_for(self, group: int) -> Conditions:
        """Return learning rate, momentum and residual unit of a param group; the defaults for group -1."""
        front_end = self._front_end
        epoch, idle = front_end.exchange_progress()
        step = Conditions(epoch=epoch, idle=idle)
        if group < 0:
            return step
        optimizer, settings = numbered_group(front_end.exchange_optimizers, group)
        rate: Any = settings.get("lr")
        if rate is None:  # the optimizer chooses it
            return step
        if not (isinstance(rate, torch.Tensor) and rate.is_cuda):  # which the worker thread reads
            rate = float(rate)
            self._units.note(optimizer, group, rate)
        momentum = momentum_of(optimizer, settings) if self._takes_momentum_over else Momentum()
        return replace(
            step,
            learning_rate=rate,
            scale_free=self._units.scale_free(optimizer),
            momentum=momentum,
            momentum_after=applies_momentum(settings) and not momentum.factor,
        )

    def place_named(self, keys: Sequence[str]) -> None:
        """Create a bucket for parameters by their names; a collective call."""
        self._front_end.place_named(keys)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the momentum buffers that belong to the state of the exchange, by the keys of the gradients."""
        return buffers_of(self._front_end)

    def load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Load momentum buffers, in any shape."""
        load_buffers(self._front_end, buffers)
