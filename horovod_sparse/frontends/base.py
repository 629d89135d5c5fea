"""Interface of the front ends that exchange gradients for optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from horovod_sparse.engine.bucket import Bucket


class FrontEnd(Protocol):
    """Exchange of the gradients of one model for one or several optimizers.

    The names do not collide with those of optimizers, on which the Horovod front end defines them.
    """

    def exchange_progress(self) -> tuple[int | None, bool]:
        """Return the epoch, None if it was not set, and whether this rank had no backward pass in this step."""
        ...

    @property
    def exchange_ranks(self) -> int:
        """World size P."""
        ...

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """Param groups of all optimizers, in order."""
        ...

    def optimizer_of(self, group: int) -> torch.optim.Optimizer:
        """Return the optimizer that a param group belongs to."""
        ...

    def bucket_of(self, parameter: torch.Tensor) -> Bucket | None:
        """Return the bucket that exchanges the gradient of a parameter; None if there is none."""
        ...

    def place_named(self, keys: Sequence[str]) -> None:
        """Create a bucket for parameters by their names, if they are known and have none; a collective call."""
        ...
