"""Step-ahead error feedback: gradients at the parameters as they would be with empty residuals.

After A. Xu, Z. Huo and H. Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed Gradient", AAAI
2021. It separates two effects of a residual: it arrives late, and meanwhile gradients are computed at parameters that
lack it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch


class Ahead:
    """Context that applies the residuals to the parameters while gradients are computed.

    Args:
        optimizer: An ``hvs.DistributedOptimizer`` around SGD. Residual times learning rate is the missing update.
        mean: Whether to use the ranks' mean residual, which is what the parameters lack but needs a dense exchange, or
            the rank's own residual, which needs none.
    """

    def __init__(self, optimizer: Any, mean: bool) -> None:
        self._optimizer, self._mean = optimizer, mean
        self._named = {name: p for p, name in optimizer._parameter_names.items()}
        self._rates: list[float] = []  # at which the residuals were computed; empty before the first step

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Shift the parameters, and restore them at the end; a collective call."""
        before = []
        for parameter, shift in self._shifts():
            before.append((parameter, parameter.detach().clone()))
            parameter.data.sub_(shift.view_as(parameter))
        yield
        for parameter, value in before:
            parameter.data.copy_(value)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def _shifts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters and their shifts."""
        if not self._rates:
            return []
        shifts = []
        states = self._optimizer.compression_state_dict()["buckets"]
        for bucket, state in zip(self._optimizer.exchange.worker.buckets, states, strict=True):
            held = torch.as_tensor(state["memory"]["residual"])
            if self._mean:
                held = hvd.allreduce(held, name=f"held.{bucket.layout.number}")
            held *= self._rates[bucket.layout.group]
            shifts += [(self._named[s.key], held[s.start : s.start + s.size]) for s in bucket.layout.segments]
        return shifts
