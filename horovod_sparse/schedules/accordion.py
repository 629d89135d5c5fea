"""Accordion: a high density while gradients change, a low one in between (Agarwal et al., MLSys 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.kernels import kernels_for, to_device
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import integer, number
from horovod_sparse.rules.states import checked_flag, checked_integer, checked_number
from horovod_sparse.schedules.constant import Constant

_ROUNDING = 1e-9  # of a mean of equal learning rates


class Accordion(Constant):
    """Compares the norm of an epoch's summed gradient with that of ``interval`` epochs before.

    A large change asks for the high density, any other comparison for the low one. A learning rate that is lower than
    in the epoch before asks for the high one at once, until the next comparison. Until the first one the density is
    high.

    In every ``interval``-th epoch each rank sums its own gradients, in a buffer of the bucket's size; the noise of
    single steps cancels out. The norm is the root of the mean square over the ranks; the authors take one rank's.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Constant.Options):
        """Options of Accordion; the density configured is the low one.

        Attributes:
            high_density: The high one.
            interval: Epochs from one comparison to the next.
            change: Relative change of the norm from which on the density is high.
            steps_per_epoch: So many steps count as an epoch; None: ``optimizer.set_epoch`` tells epochs.
        """

        high_density: float = number(0.1, lambda x: 0 < x <= 1, "in (0, 1]")
        interval: int = integer(10, least=1)
        change: float = number(0.5, lambda x: x > 0, "above 0", hint="0.5 stands for half of the norm before")
        steps_per_epoch: int | None = integer(None, least=1, hint="without it, optimizer.set_epoch() tells epochs")

    def __init__(self, context: BucketContext, density: float, options: Options) -> None:
        super().__init__(context, density, options)
        if density > options.high_density:
            raise ValueError(f"high_density must be at least density ({density}), not {options.high_density}")
        self._epoch = -1  # in progress; -1: none so far
        self._sum = np.empty_like(context.like, shape=(0,))  # of this rank's gradients in the epoch; empty: not wanted
        self._scale = 1.0  # their loss scale
        self._steps = 0  # that they are the sum of
        self._norm = math.nan  # at the last comparison
        self._learning_rate = math.nan  # of the epoch
        self._high = True

    def _densities(self, step: Step) -> Sequence[float]:
        epoch = step.epochs(self._options.steps_per_epoch)
        if epoch != self._epoch:
            self._begin(epoch, step)
        if self._sum.size and not step.idle:
            scale, self._scale = step.loss_scale / self._scale, step.loss_scale
            kernels_for(self._sum).accumulate(step.gradients, self._sum, scale)
            self._steps += 1
        return (self._options.high_density,) if self._high else super()._densities(step)

    def _begin(self, epoch: int, step: Step) -> None:
        """Ends an epoch and begins one; a collective call."""
        known, works = float(self._steps > 0), float(not step.idle)  # a rank in `hvd.join()` does not know the rate
        numbers = [self._square_norm(), known, works * step.learning_rate, works]
        square, known, rate, works = self._context.mean(numbers)
        if self._sum.size and known:
            norm = math.sqrt(square / known)
            # What there was before the first norm is NaN, with which comparisons are false.
            self._high = not abs(self._norm - norm) < self._options.change * self._norm
            self._norm = norm
        rate = rate / works if works else self._learning_rate
        self._high |= rate < self._learning_rate * (1 - _ROUNDING)
        self._epoch, self._learning_rate, self._steps = epoch, rate, 0
        wanted = self._context.size if epoch % self._options.interval == 0 else 0
        self._sum = np.zeros_like(self._context.like, shape=(wanted,))

    def _square_norm(self) -> float:
        """Of the mean gradient of this rank's steps; 0 where there were none."""
        if not self._steps:
            return 0.0
        square: float = kernels_for(self._sum).square_norm([(0, self._sum)])
        return square / (self._scale * self._steps) ** 2

    def state_dict(self) -> dict[str, Any]:
        """The epoch so far, and what it will be compared with. The sum is the buffer itself, not a copy."""
        return {
            "epoch": self._epoch,
            "sum": self._sum,
            "scale": self._scale,
            "steps": self._steps,
            "norm": self._norm,
            "learning_rate": self._learning_rate,
            "high": self._high,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``; ValueError if a value is impossible."""
        if state["sum"].size not in (0, self._context.size):
            raise ValueError(f"sum of accordion must have 0 or {self._context.size} elements, not {state['sum'].size}")
        self._sum = to_device(state["sum"].copy(), self._context.like)
        self._epoch = checked_integer(state["epoch"], "epoch of accordion", least=-1)
        self._steps = checked_integer(state["steps"], "steps of accordion")
        self._scale = checked_number(state["scale"], "scale of accordion", finite=True)
        self._norm = checked_number(state["norm"], "norm of accordion")
        self._learning_rate = checked_number(state["learning_rate"], "learning_rate of accordion")
        self._high = checked_flag(state["high"], "high of accordion")
