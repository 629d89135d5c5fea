"""Exchange of gradients before a GradScaler unscales them, which it does before it calls step()."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler

from horovod_sparse.control.lifecycle import process


def exchange_before_unscaling() -> None:
    """Make every GradScaler of this process complete the exchange of gradients before it unscales them.

    Unscaling does not change the gradients' version counters, so it could not be detected afterwards.
    """
    process.replace(GradScaler, "_unscale_grads_", _completing_exchange)


def _completing_exchange(unscale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(unscale)
    def exchange_and_unscale(scaler: GradScaler, optimizer: Any, *arguments: Any) -> Any:
        complete = getattr(optimizer, "_synchronize_for_scaler", None)
        if complete is not None:
            complete()
        return unscale(scaler, optimizer, *arguments)

    return exchange_and_unscale
