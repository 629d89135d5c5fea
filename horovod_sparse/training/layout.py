"""Layout of the buckets: gradients that travel together, in an order that is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from horovod_sparse.kernels.types import MAX_SIZE
from horovod_sparse.training.device import Device, device_of, real_dtype


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in its bucket: positions start .. start + size, in the parameter's logical order."""

    name: str
    parameter: torch.Tensor
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Parameters of one param group, one precision and one device.

    Attributes:
        number: Place in the order of exchange.
        slots: The parameters, back to back.
        size: Elements of all slots.
        dtype: What gradients are accumulated and sent in: float64 for float64 parameters, float32 for all others.
        group: Index of the optimizer's param group, whose learning rate the residual follows.
        dense: It travels whole.
    """

    number: int
    slots: tuple[Slot, ...]
    size: int
    dtype: torch.dtype
    group: int
    dense: bool = False

    @property
    def device(self) -> Device:
        """The device of its parameters and gradients."""
        return device_of(self.slots[0].parameter.device)

    @property
    def names(self) -> list[str]:
        """The names of its parameters."""
        return [slot.name for slot in self.slots]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter before it has a bucket.

    Attributes:
        name: Its name, the same on every rank.
        parameter: The parameter.
        group: Index of its param group.
        together: Parameters with the same number that is not None share a bucket, whatever its size.
        dense: It is to travel whole, with others of the kind.
    """

    name: str
    parameter: torch.Tensor
    group: int
    together: int | None = None
    dense: bool = False


def plan(members: Iterable[Member], bucket_bytes: int) -> list[Layout]:
    """Divides parameters into buckets, in the order given.

    Args:
        members: The parameters in the order in which their gradients are expected.
        bucket_bytes: A bucket is closed before it would exceed this; a larger parameter has a bucket of its own.

    Returns:
        The buckets' layouts in the order of exchange, which is that in which they are expected to be complete.

    Raises:
        ValueError: A bucket would hold 2**31 elements or more.
    """
    open_lists: dict[tuple[object, ...], list[Member]] = {}
    closed: list[list[Member]] = []
    members = list(members)
    for member in members:
        kind = (
            real_dtype(member.parameter.dtype),
            member.parameter.device,
            member.group,
            member.together,
            member.dense,
        )
        current = open_lists.setdefault(kind, [])
        if current and member.together is None and _bytes([*current, member]) > bucket_bytes:
            closed.append(current)
            current = open_lists[kind] = []
        current.append(member)
    expected = {member.parameter: number for number, member in enumerate(members)}
    lists = sorted([*closed, *open_lists.values()], key=lambda chosen: expected[chosen[-1].parameter])
    return [_layout(number, chosen) for number, chosen in enumerate(lists)]


def _layout(number: int, members: Sequence[Member]) -> Layout:
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
    return Layout(
        number, tuple(slots), start, real_dtype(members[0].parameter.dtype), members[0].group, members[0].dense
    )


def _bytes(members: Sequence[Member]) -> int:
    return sum(member.parameter.numel() for member in members) * real_dtype(members[0].parameter.dtype).itemsize
