"""Scratch buffers of a bucket's size, needed only during a step and shared by all buckets."""

from __future__ import annotations

import threading

import numpy as np

from horovod_sparse.kernels.types import Array


class Scratch:
    """Pool that lends arrays and keeps the largest returned one for the next step.

    Fresh memory costs a page fault every 4 KiB, which takes as long as the work done in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: Array | None = None

    def lend(self, size: int, like: Array) -> Array:
        """Return an uninitialized array [size] with the dtype and on the device of ``like``."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is None or idle.size < size or _kind(idle) != _kind(like):
            idle = np.empty_like(like, shape=(size,))
        return idle[:size]

    def give_back(self, array: Array) -> None:
        """Return an array from ``lend`` to the pool."""
        whole: Array = array if array.base is None else array.base
        with self._lock:
            if self._idle is None or self._idle.nbytes < whole.nbytes:
                self._idle = whole


def _kind(array: Array) -> tuple[object, ...]:
    return type(array), array.dtype, getattr(array, "device", None)  # NumPy 1 arrays have no ``device``


# Buckets are exchanged one at a time, so that one array serves all of them.
SCRATCH = Scratch()
