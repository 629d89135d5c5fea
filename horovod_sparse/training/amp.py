"""A GradScaler writes to gradients before it calls step(): they must have been exchanged by then."""

from __future__ import annotations

import functools
from typing import Any

from torch.amp import GradScaler


@functools.cache
def exchange_before_unscaling() -> None:
    """Lets every GradScaler of this process complete the exchange of an optimizer whose gradients it is to unscale.

    What it does to gradients leaves no trace in their version counters, and so it could not be told afterwards.
    """
    unscale = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def exchange_and_unscale(scaler: GradScaler, optimizer: Any, *arguments: Any) -> Any:
        complete = getattr(optimizer, "_complete_exchange", None)
        if complete is not None:
            complete()
        return unscale(scaler, optimizer, *arguments)

    GradScaler._unscale_grads_ = exchange_and_unscale  # type: ignore[assignment, method-assign]
