"""Sharded tensors in a checkpoint: each shard is saved once, and loaded into any other sharding.

``torch.distributed.checkpoint`` would do the same, but its metadata is a pickle, whose loading can execute code.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from horovod_sparse.frontends.optimizers import parameters_in
from horovod_sparse.frontends.shards import Chunk, fill, shard_of, with_shard

_Path: TypeAlias = tuple[Any, ...]
Shards: TypeAlias = dict[_Path, tuple[Any, torch.Tensor]]


def layout_of(model: nn.Module) -> str:
    """Return a digest of which shards of the parameters this rank holds; empty unless the model is sharded."""
    sharded: dict[str, Any] = {name: p for name, p in model.named_parameters() if _is_sharded(p)}
    # With the place in the mesh, as several ranks of a replica may hold nothing of a small model.
    shards = [(name, Chunk.of(p), p.device_mesh.get_coordinate()) for name, p in sharded.items()]
    return hashlib.sha256(repr(shards).encode()).hexdigest() if shards else ""


def number_in(layouts: Sequence[str], rank: int) -> int:
    """Return how many ranks before a rank hold the same shards: the number of its replica."""
    return layouts[:rank].count(layouts[rank])


def ranks_for(saved: Sequence[str], layouts: Sequence[str], rank: int) -> list[int]:
    """Return the old ranks whose files a rank needs: the first replica, and those that this rank's replica takes over.

    Replica r of R takes over the old replicas r, r + R and so on. Where nothing has changed, only the old rank of the
    first replica that held the same shards is needed.
    """
    numbers = [number_in(saved, old) for old in range(len(saved))]
    if saved == layouts:
        return [saved.index(layouts[rank])]
    replica, replicas = number_in(layouts, rank), layouts.count(layouts[rank])
    return [old for old, number in enumerate(numbers) if number == 0 or number % replicas == replica]


def split(state: dict[str, Any]) -> tuple[dict[str, Any], Shards]:
    """Return the state with tensors of the meta device in place of sharded ones, and this rank's shards by path."""
    shards: Shards = {}

    def take(path: _Path, value: Any) -> Any:
        if not _is_sharded(value):
            return value
        shards[path] = (tuple(Chunk.of(value)), shard_of(value).detach())
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return _mapped(state, take), shards


def join(state: dict[str, Any], pieces: Sequence[Shards], objects: Mapping[_Path, Any]) -> dict[str, Any]:
    """Return the state with the tensors that ``split`` took out, sharded like those of the objects to load.

    Args:
        state: State of the objects, as ``split`` returned it.
        pieces: Shards of all ranks of one replica; those that do not overlap with this rank's may be left out.
        objects: Model, optimizer and other objects, by the paths of their states.

    Raises:
        ValueError: A tensor does not fit the objects, or a shard is missing.
    """
    targets = {path: target for prefix, one in objects.items() for path, target in _targets(prefix, one).items()}

    def put(path: _Path, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        target = targets.get(path, targets.get(path[:-1]))
        complete = not value.is_meta
        if complete and (target is None or not _is_sharded(target) or target.shape != value.shape):
            return value
        name = ".".join(map(str, path))
        if target is None:
            raise ValueError(f"{name} was saved from a sharded tensor, but there is none here: it is another model")
        shards = [(Chunk.of(value), value)] if complete else [_read(one[path]) for one in pieces if path in one]
        local = torch.empty(shard_of(target).shape, dtype=value.dtype, device="cpu")
        fill(local, Chunk.of(target), shards, name)
        return with_shard(target, local.to(target.device))

    joined: dict[str, Any] = _mapped(state, put)
    return joined


def _read(saved: tuple[Any, torch.Tensor]) -> tuple[Chunk, torch.Tensor]:
    chunk, values = saved
    return Chunk.read(chunk), values


def _targets(prefix: _Path, loaded: Any) -> dict[_Path, torch.Tensor]:
    """Return the tensors of an object by their paths in its state; for an optimizer, the parameters of each state."""
    found: dict[_Path, torch.Tensor] = {}
    if hasattr(loaded, "param_groups"):
        return {(*prefix, "state", index): p for index, p in enumerate(parameters_in(loaded))}

    def note(path: _Path, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found[path] = value
        return value

    _mapped(loaded.state_dict(), note, prefix)
    return found


def _mapped(state: Any, change: Callable[[_Path, Any], Any], path: _Path = ()) -> Any:
    """Return nested dicts and lists with each value changed; the argument is not modified."""
    if type(state) in (dict, OrderedDict):
        copy = type(state)((key, _mapped(value, change, (*path, key))) for key, value in state.items())
        if type(state) is OrderedDict:
            vars(copy).update(vars(state))  # in which torch keeps the metadata of a model's state
        return copy
    if type(state) in (list, tuple):
        return type(state)(_mapped(value, change, (*path, index)) for index, value in enumerate(state))
    return change(path, state)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "to_local")
