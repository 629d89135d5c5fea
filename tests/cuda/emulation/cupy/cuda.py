"""Streams, devices and memory, of which the emulation has one each."""

from __future__ import annotations

from typing import Any

from . import _nvrtc as nvrtc
from . import _stream
from ._nvrtc import Module
from ._stream import alloc_pinned_memory

__all__ = [
    "Device",
    "Event",
    "MemoryPointer",
    "Module",
    "Stream",
    "UnownedMemory",
    "alloc_pinned_memory",
    "get_current_stream",
    "nvrtc",
    "runtime",
]


class Stream:
    """Work is done at once, so that there is nothing to wait for; that somebody would wait is counted."""

    null: Any = None

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self.ptr = 0

    def synchronize(self) -> None:
        _count_wait()
        _stream.settle()


Stream.null = Stream()


def get_current_stream(device_id: int = -1) -> Stream:
    return Stream.null


class Event:
    """What the stream had been told when it was recorded."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._number = 0

    def record(self, stream: Stream | None = None) -> None:
        self._number = _stream.told()

    @property
    def done(self) -> bool:
        return _stream.is_done(self._number)

    def synchronize(self) -> None:
        _count_wait()
        _stream.finish(self._number)


def _count_wait() -> None:
    import cupy

    cupy._count("synchronize")


class UnownedMemory:
    """Memory of somebody else, who is kept."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        assert ptr or device_id >= 0, "UnownedMemory requires explicit device ID for a null pointer."
        self.ptr, self.size, self._owner = ptr, size, owner


class MemoryPointer:
    """A place in memory."""

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Device:
    """Device 0, with a number of multiprocessors that makes grids small."""

    id = 0
    compute_capability = "90"

    def __init__(self, device: int | None = None) -> None:
        assert device in (None, 0)

    attributes: dict[str, Any] = {"MultiProcessorCount": 2}  # noqa: RUF012

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class runtime:
    """The part of the CUDA runtime that is asked for."""

    @staticmethod
    def getDeviceCount() -> int:
        return 1
