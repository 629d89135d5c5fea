"""Conditions of a step as they were read when its exchange was started."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from horovod_sparse.rules import Conditions


class Reading(NamedTuple):
    """Conditions of a step, read in program order: a script may change them while the worker thread is still busy.

    What may be on the device, scale and learning rate, is waited for on the worker thread.

    Attributes:
        conditions: The conditions, whose learning rate may be on the device; or the error of reading them.
        grad_scaler: The scaler of the loss, whose scale may be on the device.
        exposed: Seconds, as in ``Conditions``.
    """

    conditions: Conditions | Exception
    grad_scaler: torch.amp.GradScaler | None = None
    exposed: float = 0.0

    def wait(self) -> Conditions:
        """Return the conditions, after the work of the device that they depend on; raise the error, if it is one."""
        if isinstance(self.conditions, Exception):
            raise self.conditions
        scale = 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()
        return replace(
            self.conditions, learning_rate=float(self.conditions.learning_rate), loss_scale=scale, exposed=self.exposed
        )
