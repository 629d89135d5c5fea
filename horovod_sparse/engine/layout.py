"""Layout of the buckets: which gradients are exchanged together, in an order that is the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from horovod_sparse.costs.step import bucket_limit
from horovod_sparse.engine.device import Device, device_of, real_dtype
from horovod_sparse.kernels.types import MAX_SIZE
from horovod_sparse.rules import Mode


class Segment(NamedTuple):
    """Positions start .. start + size of a bucket, which hold one flat gradient.

    Attributes:
        key: Name of the gradient, the same on every rank and in every run.
        start: First position.
        size: Number of elements.
    """

    key: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Segments of one bucket: gradients of one param group, one precision and one device.

    Attributes:
        number: Position in the order of exchange.
        segments: The segments, without gaps.
        size: Number of elements.
        dtype: Precision in which gradients are accumulated and sent: float64 for float64 gradients, else float32.
        torch_device: The device of the gradients.
        group: Number of the param group, whose learning rate the residual follows; -1: none.
        small: Whether nothing is selected from the bucket: all of it is sent in every step.
    """

    number: int
    segments: tuple[Segment, ...]
    size: int
    dtype: torch.dtype
    torch_device: torch.device
    group: int
    small: bool = False

    @property
    def device(self) -> Device:
        """The device on which kernels run."""
        return device_of(self.torch_device)

    @property
    def keys(self) -> list[str]:
        """The keys of the segments, in order."""
        return [segment.key for segment in self.segments]


class Member(NamedTuple):
    """A gradient that is to be assigned to a bucket.

    Attributes:
        key: Name, the same on every rank and in every run.
        size: Number of elements.
        dtype: Precision in which the gradient is accumulated and sent: float64 or float32.
        device: Device of the gradient.
        group: Number of the param group, from the front end; -1: none.
        together: Members with the same number share a bucket, whatever its size; None: no such group.
        small: Whether the gradient is never selected from, and shares a bucket with others of this kind.
    """

    key: str
    size: int
    dtype: torch.dtype
    device: torch.device
    group: int
    together: int | None = None
    small: bool = False

    @classmethod
    def of(
        cls,
        key: str,
        parameter: torch.Tensor,
        group: int,
        together: int | None = None,
        least: int = 0,
        shard: torch.Tensor | None = None,
    ) -> Member:
        """Return the member for the gradient of a parameter.

        Args:
            key: Name of the gradient.
            parameter: The parameter. A complex one counts as small: optimizers take real and imaginary parts together,
                while a selection would separate them.
            group: Number of the param group.
            together: Number of the user's group.
            least: Elements from which on a parameter is selected from.
            shard: What this rank holds of the parameter; None: all of it.
        """
        complex_, held = parameter.is_complex(), parameter if shard is None else shard
        small = complex_ or parameter.numel() < least
        size = held.numel() * (2 if complex_ else 1)
        return cls(key, size, real_dtype(parameter.dtype), parameter.device, group, together, small)


def bucket_bytes_for(members: Sequence[Member], mode: Mode) -> int:
    """Return the limit of a bucket in bytes for the gradients of a model, in the mode of most steps."""
    nbytes = sum(member.size * member.dtype.itemsize for member in members)
    return int(bucket_limit(nbytes, mode is not Mode.SELECT))


def plan(members: Sequence[Member], bucket_bytes: int, first: int = 0) -> list[Layout]:
    """Assign gradients to buckets, in the order given.

    Args:
        members: The gradients, in the order in which they are expected.
        bucket_bytes: Limit of a bucket in bytes; a larger gradient has a bucket of its own.
        first: Number of the first bucket.

    Returns:
        The layouts in the order of exchange, which is the order in which the buckets are expected to be complete, but
        for the last one that is not small: it comes last.

    Raises:
        ValueError: A bucket would hold 2**31 elements or more.
    """
    open_buckets: dict[tuple[object, ...], _Bucket] = {}
    closed: list[_Bucket] = []
    kind: tuple[object, ...] = ()
    for expected, member in enumerate(members):
        nbytes = member.size * member.dtype.itemsize
        if member[2:] != kind:  # everything but key and size
            kind = member[2:]
            current = open_buckets.setdefault(kind, _Bucket())
        if current.members and member.together is None and current.nbytes + nbytes > bucket_bytes:
            closed.append(current)
            current = open_buckets[kind] = _Bucket()
        current.members.append(member)
        current.nbytes += nbytes
        current.complete = expected
    in_order = sorted([*closed, *open_buckets.values()], key=lambda bucket: bucket.complete)
    # Small parameters at the end wait for a round of messages less if they are sent together with the last bucket.
    selecting = [place for place, bucket in enumerate(in_order) if not bucket.members[0].small]
    last = selecting[-1] if selecting else len(in_order)
    in_order = [*in_order[:last], *in_order[last + 1 :], *in_order[last : last + 1]]
    return [_layout(number, bucket.members) for number, bucket in enumerate(in_order, first)]


@dataclass(slots=True)
class _Bucket:
    """A bucket that is being filled.

    Attributes:
        members: Gradients so far.
        nbytes: Bytes of these gradients.
        complete: Position of the last gradient in the expected order.
    """

    members: list[Member] = field(default_factory=list)
    nbytes: int = 0
    complete: int = 0


def _layout(number: int, members: Sequence[Member]) -> Layout:
    segments: list[Segment] = []
    start = 0
    for member in members:
        segments.append(Segment(member.key, start, member.size))
        start += member.size
    if start > MAX_SIZE:
        keys = ", ".join(segment.key for segment in segments[:3])
        raise ValueError(
            f"bucket {number} ({keys}, ...) has {start} elements, more than {MAX_SIZE}: indices are int32; "
            "lower bucket_bytes, name smaller groups, or split the parameter"
        )
    first = members[0]
    return Layout(number, tuple(segments), start, first.dtype, first.device, first.group, first.small)
