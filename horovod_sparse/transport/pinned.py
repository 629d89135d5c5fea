"""Pinned host memory, for asynchronous copies from and to the device."""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any

import cupy
import numpy as np

from horovod_sparse.kernels.types import Array

_LEAST = 1 << 12  # smallest block in bytes
_BYTE = np.dtype(np.uint8)


class Block:
    """Block of ``size`` bytes of pinned memory, with an event that marks the end of its last copy."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        self._copied = cupy.cuda.Event(disable_timing=True)

    def view(self, nbytes: int, dtype: np.dtype[Any] = _BYTE) -> Array:
        """Return the first bytes as a NumPy array."""
        return self._memory[:nbytes].view(dtype)

    def load(self, array: Array) -> None:
        """Start copying a device array into the block, on the current stream."""
        stream = cupy.cuda.get_current_stream()
        array.get(stream, out=self.view(array.nbytes, array.dtype), blocking=False)  # type: ignore[attr-defined]  # CuPy's
        self._copied.record(stream)

    def unload(self, array: Array) -> None:
        """Start copying the block into a device array, on the current stream."""
        stream = cupy.cuda.get_current_stream()
        array.set(self.view(array.nbytes, array.dtype), stream)  # type: ignore[attr-defined]  # CuPy's
        self._copied.record(stream)

    def wait(self) -> None:
        """Wait until the last copy is complete."""
        if not self._copied.done:
            self._copied.synchronize()


class Pool:
    """Pool of idle blocks. Sizes are powers of two, so that a longer message seldom needs a new block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, deque[Block]] = {}  # by size; oldest first, as its copy completes first

    def lend(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes`` bytes that the device no longer uses."""
        least = 1 << (max(nbytes, _LEAST) - 1).bit_length()
        with self._lock:
            fitting = [size for size, blocks in self._idle.items() if size >= least and blocks]
            smaller = [size for size, blocks in self._idle.items() if size < least and blocks]
            # If none fits, a new block replaces the longest that is too short.
            used = min(fitting) if fitting else max(smaller, default=None)
            block = None if used is None else self._idle[used].popleft()
        if block is not None:
            block.wait()  # also before its memory is freed
        return block if block is not None and block.size >= least else Block(least)

    def give_back(self, block: Block) -> None:
        """Return a block to the pool. The device may still be using it."""
        with self._lock:
            self._idle.setdefault(block.size, deque()).append(block)


def pool() -> Pool:
    """Return the pool of the current device. All buckets share it, because they take turns."""
    return _pool(cupy.cuda.Device().id)


@functools.cache
def _pool(device: int) -> Pool:
    del device  # only the cache key: events belong to a device
    return Pool()
