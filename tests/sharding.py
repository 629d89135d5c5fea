"""Models sharded by FSDP2 on the first ranks, in any grid of replicas and shards, and what their exchanges hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from training import batch

import horovod_sparse as hvs
from horovod_sparse.frontends.shards import Chunk


def grid(replicas: int, shards: int) -> DeviceMesh:
    """Return the mesh of the first ranks; a collective call of all ranks."""
    ranks = torch.arange(replicas * shards, device="cpu").view(replicas, shards)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))


def grids(ranks: int) -> list[tuple[int, int]]:
    """Return numbers of replicas and shards that fit."""
    return [(replicas, shards) for replicas in range(1, ranks + 1) for shards in range(1, ranks // replicas + 1)]


def shard(model: nn.Module, mesh: Any, layers: Iterable[nn.Module] | None = None, **of_fsdp: Any) -> nn.Module:
    """Shard some layers, by default all that have parameters, and the model."""
    with_parameters = [module for module in model.children() if next(module.parameters(), None) is not None]
    for module in with_parameters if layers is None else layers:
        fully_shard(module, mesh=mesh, **of_fsdp)
    return fully_shard(model, mesh=mesh, **of_fsdp)


def exchanged(model: nn.Module, mesh: DeviceMesh, compression: Any, optimizer: Any, **more: Any) -> Any:
    return hvs.fsdp.sparse_all_reduce(model, mesh.get_group("replicate"), compression, optimizer, **more)


def full(*models: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters, gathered from the shards; a collective call."""
    return [p.full_tensor().detach().clone() for model in models for p in model.parameters()]


def uneven() -> nn.Sequential:
    """Return a model whose shards are uneven, or empty, on any number of ranks above 1."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 63), nn.Tanh(), nn.Linear(63, 4), nn.Tanh(), nn.Linear(4, 1))


def uneven_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    loss: torch.Tensor = nn.functional.mse_loss(model(x), y[:, :1])
    return loss


def masses(states: Iterable[Mapping[str, Any]], name: str = "residual") -> dict[str, torch.Tensor]:
    """Return what the states of all ranks hold of each element, summed over the replicas."""
    totals: dict[str, torch.Tensor] = {}
    for state in states:
        for bucket in state["buckets"]:
            start = 0
            for key in bucket["parameters"] if "memory" in bucket else ():
                chunk = Chunk.read(state["chunks"][key])
                part = bucket["memory"][name][start : start + chunk.elements].view(chunk.sizes)
                total = totals.setdefault(key, torch.zeros(chunk.shape, dtype=torch.float64))
                total[tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))] += part
                start += chunk.elements
    return totals


def parts_of(state: Mapping[str, Any], name: str = "residual") -> dict[str, torch.Tensor]:
    """What a rank's state of a sparse reduce-scatter holds of each parameter, flat; may end with padding."""
    found = {}
    for bucket in state["buckets"]:
        for key, (place, width) in state["layout"].get(bucket["parameters"][0], {}).items():
            rows = torch.zeros(state["shards"], width)
            rows[state["owners"]] = bucket["memory"][name].view(len(state["owners"]), -1)[:, place : place + width]
            found[key] = rows.flatten()
    return found


def first(ranks: int) -> Any:
    """Return the group of the first ranks; a collective call of all ranks."""
    return distributed.new_group(list(range(ranks)))
