"""All front ends behind one function, for situations that must be the same in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from sharding import exchanged, grid, shard
from torch import distributed, nn
from training import wrap_local
from trainings import through_horovod

import horovod_sparse as hvs

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class Started(NamedTuple):
    """A model in training.

    Attributes:
        model: What computes the loss.
        optimizer: What takes the steps.
        exchange: What holds the state of the exchange.
    """

    model: nn.Module
    optimizer: Any
    exchange: Any


def start(front_end: str, model: nn.Module, make: Make, compression: Any, **more: Any) -> Started:
    """Begin training through a front end; FSDP with one shard per replica. ``make`` takes the parameters."""
    if front_end == "stock":
        replica = nn.parallel.DistributedDataParallel(model)
        return Started(replica, make(model.parameters()), None)
    if front_end == "Horovod":
        _, optimizer = through_horovod(model, compression, make(model.parameters()), **more)
        return Started(model, optimizer, optimizer)
    if front_end == "local":
        optimizer = wrap_local(model, compression, make(model.parameters()), local_steps=1, **more)
        return Started(model, optimizer, optimizer)
    if front_end == "DDP":
        optimizer = make(model.parameters())
        replica = nn.parallel.DistributedDataParallel(model)
        state = hvs.ddp.SparseState(compression, optimizer, **more)
        replica.register_comm_hook(state, hvs.ddp.sparse_hook)
        return Started(replica, optimizer, state)
    mesh = grid(distributed.get_world_size(), 1)
    shard(model, mesh["shard"])
    optimizer = make(model.parameters())
    return Started(model, optimizer, exchanged(model, mesh, compression, optimizer, **more))


GRADIENTS = ("Horovod", "DDP", "FSDP")  # front ends that exchange gradients
