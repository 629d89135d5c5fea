"""Shards of distributed tensors, which FSDP2 makes of parameters, gradients and the state of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed


@torch.no_grad()
def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, with shared memory: the tensor itself unless it is a DTensor.

    By attribute, as an import of ``torch.distributed.tensor`` takes longer than that of this package.
    """
    to_local: Any = getattr(tensor, "to_local", None)
    shard: torch.Tensor = tensor if to_local is None else to_local()
    return shard


def total_norm(norm: float, tensors: Iterable[torch.Tensor]) -> float:
    """Return the norm of tensors from that of this rank's shards.

    A collective call of the ranks that hold the shards, if there are any; on one mesh of one dimension.
    """
    meshes: set[Any] = {getattr(tensor, "device_mesh", None) for tensor in tensors} - {None}
    for mesh in meshes:
        square = torch.tensor(norm**2, dtype=torch.float64, device=mesh.device_type)
        distributed.all_reduce(square, group=mesh.get_group())
        norm = math.sqrt(square)
    return norm
