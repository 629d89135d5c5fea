"""A GradScaler writes to gradients before it calls step(): they must have been exchanged by then."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler

from horovod_sparse.control.lifecycle import process


def exchange_before_unscaling() -> None:
    """Let every GradScaler of this process complete the exchange of gradients that it is about to unscale.

    What it does to gradients leaves no trace in their version counters, and so it could not be told afterwards.
    """
    process.replace(GradScaler, "_unscale_grads_", _exchanging)


def _exchanging(unscale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(unscale)
    def exchange_and_unscale(scaler: GradScaler, optimizer: Any, *arguments: Any) -> Any:
        complete = getattr(optimizer, "_complete_exchange", None)
        if complete is not None:
            complete()
        return unscale(scaler, optimizer, *arguments)

    return exchange_and_unscale
