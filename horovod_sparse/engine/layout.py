"""Layout of the buckets: gradients that travel together, in an order that is the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from horovod_sparse.engine.device import Device, device_of, real_dtype
from horovod_sparse.kernels.types import MAX_SIZE


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
        group: Index of the optimizer's param group, whose learning rate the residual follows; -1: there is none.
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
        group: Index of its param group; -1: it has none.
        together: Parameters with the same number that is not None share a bucket, whatever its size.
        dense: It is to travel whole, with others of the kind.
    """

    name: str
    parameter: torch.Tensor
    group: int
    together: int | None = None
    dense: bool = False


def plan(members: Sequence[Member], bucket_bytes: int, first: int = 0) -> list[Layout]:
    """Divides parameters into buckets, in the order given.

    Args:
        members: The parameters in the order in which their gradients are expected.
        bucket_bytes: A bucket is closed before it would exceed this; a larger parameter has a bucket of its own.
        first: Number of the first bucket.

    Returns:
        The buckets' layouts in the order of exchange, which is that in which they are expected to be complete.

    Raises:
        ValueError: A bucket would hold 2**31 elements or more.
    """
    open_lists: dict[tuple[object, ...], _Bucket] = {}
    closed: list[_Bucket] = []
    for expected, member in enumerate(members):
        parameter, dtype = member.parameter, real_dtype(member.parameter.dtype)
        kind = (dtype, parameter.device, member.group, member.together, member.dense)
        nbytes = parameter.numel() * dtype.itemsize
        current = open_lists.setdefault(kind, _Bucket())
        if current.members and member.together is None and current.nbytes + nbytes > bucket_bytes:
            closed.append(current)
            current = open_lists[kind] = _Bucket()
        current.members.append(member)
        current.nbytes += nbytes
        current.complete = expected
    in_order = sorted([*closed, *open_lists.values()], key=lambda bucket: bucket.complete)
    return [_layout(number, bucket.members) for number, bucket in enumerate(in_order, first)]


@dataclass(slots=True)
class _Bucket:
    """A bucket in the making, its bytes so far, and where in the order the last of its gradients is expected."""

    members: list[Member] = field(default_factory=list)
    nbytes: int = 0
    complete: int = 0


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
