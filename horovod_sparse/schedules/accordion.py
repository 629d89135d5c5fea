"""Accordion: a high density while gradients change, otherwise a low one (Agarwal et al., MLSys 2021)."""

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

_ROUNDING = 1e-9  # relative, of a mean of equal learning rates


class Accordion(Constant):
    """Compares the norm of an epoch's summed gradient with that of ``interval`` epochs earlier.

    If the norm has changed by the fraction ``change`` or more, the density is high until the next comparison, otherwise
    low. A learning rate below that of the previous epoch makes the density high at once, until the next comparison. It
    is also high before the first comparison.

    In every ``interval``-th epoch each rank sums its own gradients in a buffer of the bucket's size, which averages out
    the noise of single steps. The norm is the root mean square over the ranks; the authors use one rank's norm.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Constant.Options):
        """Options of Accordion. The configured density is the low one.

        Attributes:
            high_density: The high density.
            interval: Epochs between comparisons.
            change: Least relative change of the norm that makes the density high.
            steps_per_epoch: Number of steps that count as an epoch; None: ``optimizer.set_epoch`` sets the epoch.
        """

        high_density: float = number(0.1, above=0, most=1)
        interval: int = integer(10, least=1)
        change: float = number(0.5, above=0, hint="0.5 is half of the previous norm")
        steps_per_epoch: int | None = integer(None, least=1, hint="leave it out to use optimizer.set_epoch()")

    predictable = False

    def __init__(self, context: BucketContext, density: float, options: Options) -> None:
        super().__init__(context, density, options)
        if density > options.high_density:
            raise ValueError(f"high_density must be at least density ({density}), not {options.high_density}")
        self._epoch = -1  # the current epoch; -1: none so far
        self._sum = np.empty_like(context.like, shape=(0,))  # this rank's gradients of the epoch; empty: not needed
        self._scale = 1.0  # loss scale of the sum
        self._steps = 0  # number of steps in the sum
        self._norm = math.nan  # at the last comparison
        self._learning_rate = math.nan  # of the current epoch
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
        """End the current epoch and begin the next. A collective operation."""
        known, works = float(self._steps > 0), float(not step.idle)  # a rank in `hvd.join()` does not know the rate
        numbers = [self._square_norm(), known, works * step.learning_rate, works]
        square, knowing, rate, working = self._context.mean(numbers)  # the latter two: shares of the ranks
        if self._sum.size and knowing:
            norm = math.sqrt(square / knowing)
            # Before the first comparison the norm is NaN, and comparisons with NaN are false.
            self._high = not abs(self._norm - norm) < self._options.change * self._norm
            self._norm = norm
        rate = rate / working if working else self._learning_rate
        self._high |= rate < self._learning_rate * (1 - _ROUNDING)
        self._epoch, self._learning_rate, self._steps = epoch, rate, 0
        wanted = self._context.size if epoch % self._options.interval == 0 else 0
        self._sum = np.zeros_like(self._context.like, shape=(wanted,))

    def _square_norm(self) -> float:
        """Return the squared norm of the mean gradient of this rank's steps; 0 if there were none."""
        if not self._steps:
            return 0.0
        square: float = kernels_for(self._sum).square_norm([(0, self._sum)])
        return square / (self._scale * self._steps) ** 2

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the current epoch and the norm to compare it with. The sum is not copied."""
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
        """Load a state from ``state_dict``; ValueError if a value is invalid."""
        if state["sum"].size not in (0, self._context.size):
            raise ValueError(f"sum of accordion must have 0 or {self._context.size} elements, not {state['sum'].size}")
        self._sum = to_device(state["sum"].copy(), self._context.like)
        self._epoch = checked_integer(state["epoch"], "epoch of accordion", least=-1)
        self._steps = checked_integer(state["steps"], "steps of accordion")
        self._scale = checked_number(state["scale"], "scale of accordion", finite=True)
        self._norm = checked_number(state["norm"], "norm of accordion")
        self._learning_rate = checked_number(state["learning_rate"], "learning_rate of accordion")
        self._high = checked_flag(state["high"], "high of accordion")
