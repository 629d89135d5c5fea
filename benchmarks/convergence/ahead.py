"""Gradients where the parameters would be if nothing were held back (step-ahead error feedback).

After A. Xu, Z. Huo and H. Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed Gradient", AAAI
2021. It tells apart two things that a residual does to a training: that it is late, and that gradients are meanwhile
computed at parameters that lack it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch


class Ahead:
    """Parameters less the learning rate times the residuals, for as long as gradients are computed.

    Args:
        optimizer: An ``hvs.DistributedOptimizer`` whose residuals are those of SGD, held as updates.
        mean: Whether the residuals are the ranks' mean, which is what the parameters lack and takes a dense exchange,
            or the rank's own, which takes none.
    """

    def __init__(self, optimizer: Any, mean: bool) -> None:
        self._optimizer, self._mean = optimizer, mean
        self._named = {name: p for p, name in optimizer._parameter_names.items()}
        self._rates: list[float] = []  # of the last step: the residuals are in its unit; nothing is held before

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Moves the parameters there and back; a collective call."""
        before = []
        for parameter, shift in self._shifts():
            before.append((parameter, parameter.detach().clone()))
            parameter.data.sub_(shift.view_as(parameter))
        yield
        for parameter, value in before:
            parameter.data.copy_(value)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def _shifts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What each parameter is moved by."""
        if not self._rates:
            return []
        shifts = []
        states = self._optimizer.compression_state_dict()["buckets"]
        for bucket, state in zip(self._optimizer.exchange.worker.buckets, states, strict=True):
            held = torch.as_tensor(state["memory"]["residual"])
            if self._mean:
                held = hvd.allreduce(held, name=f"held.{bucket.layout.number}")
            held *= self._rates[bucket.layout.group]
            shifts += [(self._named[one.key], held[one.start : one.start + one.size]) for one in bucket.layout.segments]
        return shifts
