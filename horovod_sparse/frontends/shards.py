"""Shards of distributed tensors, which FSDP2 makes of parameters, gradients and the state of an optimizer.

By attribute, as an import of ``torch.distributed.tensor`` takes longer than that of this package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import distributed

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, with shared memory; the tensor itself unless distributed."""
    if type(tensor) in _PLAIN:  # the rest takes 2 us
        return tensor
    to_local: Any = getattr(tensor, "to_local", None)
    with torch.no_grad():
        shard: torch.Tensor = tensor if to_local is None else to_local()
    return shard


def with_shard(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is distributed like another one, from this rank's shard; the shard itself if that is not."""
    like: Any = tensor
    if not hasattr(like, "to_local"):
        return shard
    made: torch.Tensor = type(like).from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


class Chunk(NamedTuple):
    """Part of a tensor that one rank holds.

    Attributes:
        shape: Shape of the tensor.
        offsets: First index of the part in each dimension.
        sizes: Shape of the part.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Chunk:
        """Return the chunk that this rank holds: all of the tensor unless it is a DTensor."""
        chunks: Any = getattr(tensor, "__create_chunk_list__", None)  # the protocol of torch.distributed.checkpoint
        if chunks is None:
            return cls(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))
        (chunk,) = chunks()
        return cls(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes))

    @classmethod
    def read(cls, saved: Any) -> Chunk:
        """Return the chunk that was saved as a tuple of tuples."""
        shape, offsets, sizes = saved
        return cls(tuple(shape), tuple(offsets), tuple(sizes))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def overlap(self, other: Chunk) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return the elements that are in both chunks, as slices of this one and of the other; None without any."""
        if self.shape != other.shape or not (self.elements and other.elements):
            return None
        here, there = [], []
        for mine, size, theirs, length in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, end = max(mine, theirs), min(mine + size, theirs + length)
            if start >= end:
                return None
            here.append(slice(start - mine, end - mine))
            there.append(slice(start - theirs, end - theirs))
        return tuple(here), tuple(there)


def fill(target: torch.Tensor, chunk: Chunk, parts: Iterable[tuple[Chunk, torch.Tensor]], name: str) -> None:
    """Copy a chunk of a tensor from chunks that other ranks have held, which may be flat.

    Chunks that several ranks have held are copied once.

    Raises:
        ValueError: The parts do not hold all of the chunk, or belong to a tensor of another shape.
    """
    filled = 0
    for part, values in dict(parts).items():
        if part.shape != chunk.shape:
            raise ValueError(f"{name} has shape {part.shape} in the state, but {chunk.shape} here: it is another model")
        both = chunk.overlap(part)
        if both is not None:
            taken = values.reshape(part.sizes)[both[1]]
            target[both[0]].copy_(taken)
            filled += taken.numel()
    if filled != chunk.elements:
        raise ValueError(
            f"the states hold {filled} elements of {name} where this rank needs {chunk.elements}: pass the states of "
            "all ranks of one save, and no others"
        )


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


def require_same_selection(parameters: Mapping[str, Any], dense_below: int) -> None:
    """Check that the ranks of one replica hold different elements of each parameter from which a selection is sent.

    Ranks that hold the same elements, as with tensor parallelism, would select different ones of them, because the rest
    of their buckets differs.

    Raises:
        ValueError: A parameter is held by several ranks of a replica, and is not sent dense.
    """
    ranks = {rank for p in parameters.values() for rank in p.device_mesh.mesh.flatten().tolist()}
    for name, p in parameters.items():
        sizes = zip(p.placements, p.device_mesh.shape, strict=True)
        shards = math.prod(size for placement, size in sizes if not placement.is_replicate())
        if shards < len(ranks) and p.numel() >= dense_below and not p.is_complex():
            raise ValueError(
                f"{name} has {shards} shards on the {len(ranks)} ranks of a replica, as with tensor parallelism: ranks "
                "that hold the same elements would select different ones, and drift apart: shard it over all of these "
                f"ranks, or send it dense with a dense_below above its {p.numel()} elements"
            )


def shard_facts(parameters: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """Return what must be the same on all replicas: how each parameter is sharded, and which shard this rank holds."""
    return tuple(
        (name, str(p.placements), tuple(p.device_mesh.shape), tuple(p.device_mesh.get_coordinate() or ()))
        for name, p in parameters.items()
    )
