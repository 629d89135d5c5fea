"""What a stream has been told to do and has not done yet.

Copies from and to pinned memory are made as late as CUDA may make them: when the device does something else, or when
somebody waits. Who reads too early finds the memory as it was before; who writes too early spoils the copy.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy

_told: deque[Callable[[], None]] = deque()
_counts = {"told": 0, "done": 0}
_pinned: list[tuple[int, int]] = []

# Whether the device may still be busy, so that MPI must not be given its memory.
busy = False

# Whether arrays can be given to MPI. "yes": the emulation's memory is the host's, so that any MPI takes it; "crash": as
# with an MPI that is not CUDA-aware; "garbage": MPI sees other memory; "": mpi4py raises.
mpi = os.environ.get("EMULATED_CUDA_AWARE_MPI", "")


def alloc_pinned_memory(size: int) -> Any:
    memory = numpy.full(size, 0x5A, numpy.uint8)
    place = memory.ctypes.data, memory.ctypes.data + size
    _pinned.append(place)
    weakref.finalize(memory, _pinned.remove, place)
    return memoryview(memory)


def copy(target: numpy.ndarray, source: numpy.ndarray, host: numpy.ndarray) -> None:
    """Copies in the order of the stream; at once, where the host's memory is not pinned."""

    def run() -> None:
        target[...] = source

    begin = host.ctypes.data
    if not any(low <= begin and begin + host.nbytes <= high for low, high in _pinned):
        finish()
        run()
        return
    _told.append(run)
    _counts["told"] += 1


def told() -> int:
    return _counts["told"]


def is_done(number: int) -> bool:
    return _counts["done"] >= number


def finish(number: int | None = None) -> None:
    """Does what the stream was told first, up to a number; None: all of it."""
    while _told and (number is None or not is_done(number)):
        _counts["done"] += 1
        _told.popleft()()


def mark_busy() -> None:
    global busy
    busy = True


def settle() -> None:
    """As after waiting for all of the stream's work."""
    global busy
    finish()
    busy = False


def interface(array: numpy.ndarray) -> dict[str, Any]:
    """How mpi4py sees an array.

    Raises:
        AttributeError: The switch ``mpi`` is off.
    """
    if not mpi:
        raise AttributeError("__cuda_array_interface__")
    if mpi == "crash":
        os.abort()
    assert not busy, "MPI is given memory that the device may still be working on"
    pointer = numpy.empty(array.nbytes + 1, numpy.uint8).ctypes.data if mpi == "garbage" else array.ctypes.data
    return {"version": 3, "shape": array.shape, "typestr": array.dtype.str, "data": (pointer, False), "strides": None}
