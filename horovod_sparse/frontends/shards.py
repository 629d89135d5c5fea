"""Shards of distributed tensors, which FSDP2 makes of parameters, gradients and the state of an optimizer."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, with shared memory: the tensor itself unless it is a DTensor.

    By attribute, as an import of ``torch.distributed.tensor`` takes longer than that of this package.
    """
    to_local: Any = getattr(tensor, "to_local", None)
    shard: torch.Tensor = tensor if to_local is None else to_local()
    return shard
