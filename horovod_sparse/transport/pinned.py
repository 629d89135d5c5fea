"""Memory of the host that the device copies from and to while other work goes on."""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any

import cupy
import numpy as np

from horovod_sparse.kernels.types import Array

_LEAST = 1 << 12  # bytes of a block
_BYTE = np.dtype(np.uint8)


class Block:
    """Pinned memory, and when the device will be done with it.

    Args:
        size: Its bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        self._copied = cupy.cuda.Event(disable_timing=True)

    def view(self, nbytes: int, dtype: np.dtype[Any] = _BYTE) -> Array:
        """Its first bytes, as a NumPy array."""
        return self._memory[:nbytes].view(dtype)

    def load(self, array: Array) -> None:
        """Begins to copy an array of the device into the block, on the current stream."""
        stream = cupy.cuda.get_current_stream()
        array.get(stream, out=self.view(array.nbytes, array.dtype), blocking=False)  # type: ignore[attr-defined]  # CuPy's
        self._copied.record(stream)

    def unload(self, array: Array) -> None:
        """Begins to copy the block into an array of the device, on the current stream."""
        stream = cupy.cuda.get_current_stream()
        array.set(self.view(array.nbytes, array.dtype), stream)  # type: ignore[attr-defined]  # CuPy's
        self._copied.record(stream)

    def wait(self) -> None:
        """Waits until the device has copied."""
        if not self._copied.done:
            self._copied.synchronize()


class Pool:
    """Lends blocks and takes them back. Sizes are powers of two, so that a longer message seldom needs a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, deque[Block]] = {}  # by size; those that came back first, which wait least, go first

    def lend(self, nbytes: int) -> Block:
        """A block of at least so many bytes, which the device does not use any more."""
        least = 1 << (max(nbytes, _LEAST) - 1).bit_length()
        with self._lock:
            fitting = [size for size, blocks in self._idle.items() if size >= least and blocks]
            smaller = [size for size, blocks in self._idle.items() if size < least and blocks]
            # A longer message than before: the new block takes the place of one that is too short.
            used = min(fitting) if fitting else max(smaller, default=None)
            block = None if used is None else self._idle[used].popleft()
        if block is not None:
            block.wait()  # also before its memory is freed
        return block if block is not None and block.size >= least else Block(least)

    def give_back(self, block: Block) -> None:
        """Ends the use of a block, which the device may still be reading."""
        with self._lock:
            self._idle.setdefault(block.size, deque()).append(block)


def pool() -> Pool:
    """The blocks of the current device: one pool for all buckets, which take their turns."""
    return _pool(cupy.cuda.Device().id)


@functools.cache
def _pool(device: int) -> Pool:
    del device  # events belong to one
    return Pool()
