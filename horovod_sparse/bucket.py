"""Buckets: gradients that travel together, in an order that is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ml_dtypes
import torch

from horovod_sparse.kernels.types import Array

# Indices are int32.
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in its bucket: positions start .. start + size, in the parameter's logical order."""

    name: str
    parameter: torch.Tensor
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one param group, one precision and one device.

    Attributes:
        number: Place in the order of exchange.
        slots: The parameters, back to back.
        size: Elements of all slots.
        dtype: What gradients are accumulated and sent in: float64 for float64 parameters, float32 for all others.
        group: Index of the optimizer's param group, whose learning rate the residual follows.
    """

    number: int
    slots: tuple[Slot, ...]
    size: int
    dtype: torch.dtype
    group: int


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter before it has a bucket.

    Attributes:
        name: Its name, the same on every rank.
        parameter: The parameter.
        group: Index of its param group.
        together: Parameters with the same number that is not None share a bucket, whatever its size.
    """

    name: str
    parameter: torch.Tensor
    group: int
    together: int | None = None


def plan(members: Iterable[Member], bucket_bytes: int) -> list[Bucket]:
    """Divides parameters into buckets, in the order given.

    Args:
        members: The parameters in the order in which their gradients are expected.
        bucket_bytes: A bucket is closed before it would exceed this; a larger parameter has a bucket of its own.

    Returns:
        The buckets in the order of exchange.

    Raises:
        ValueError: A bucket would hold 2**31 elements or more.
    """
    open_lists: dict[tuple[object, ...], list[Member]] = {}
    closed: list[list[Member]] = []
    for member in members:
        kind = (_dtype(member.parameter), member.parameter.device, member.group, member.together)
        current = open_lists.setdefault(kind, [])
        if current and member.together is None and _bytes([*current, member]) > bucket_bytes:
            closed.append(current)
            current = open_lists[kind] = []
        current.append(member)
    return [_bucket(number, chosen) for number, chosen in enumerate([*closed, *open_lists.values()])]


def _bucket(number: int, members: Sequence[Member]) -> Bucket:
    slots: list[Slot] = []
    start = 0
    for member in members:
        size = member.parameter.numel()
        slots.append(Slot(member.name, member.parameter, start, size))
        start += size
    if start > MAX_SIZE:
        names = ", ".join(slot.name for slot in slots[:3])
        raise ValueError(
            f"bucket {number} ({names}, ...) has {start} elements, more than {MAX_SIZE}: indices are int32; "
            "lower bucket_bytes, name smaller groups, or split the parameter"
        )
    return Bucket(number, tuple(slots), start, _dtype(members[0].parameter), members[0].group)


def _dtype(parameter: torch.Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _bytes(members: Sequence[Member]) -> int:
    return sum(member.parameter.numel() for member in members) * _dtype(members[0].parameter).itemsize


def array_of(tensor: torch.Tensor) -> Array:
    """A flat NumPy view of a contiguous tensor, sharing its memory.

    Args:
        tensor: Contiguous, on the CPU; float32, float64, float16 or bfloat16.
    """
    flat = tensor.detach().view(-1)
    if tensor.dtype == torch.bfloat16:  # unknown to NumPy itself
        return flat.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    array: Array = flat.numpy()
    return array
