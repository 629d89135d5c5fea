"""Scratch buffers of a bucket's size, needed only during a step and shared by all buckets."""

from __future__ import annotations

import threading

import numpy as np

from horovod_sparse.kernels.types import Array


class Scratch:
    """Pool that lends arrays, and keeps the number that were lent at the same time.

    Fresh memory costs a page fault every 4 KiB, which takes as long as the work done in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Array] = []

    def lend(self, size: int, like: Array) -> Array:
        """Return an uninitialized array [size] with the dtype and on the device of ``like``."""
        with self._lock:
            found = min(
                (number for number, idle in enumerate(self._idle) if idle.size >= size and _kind(idle) == _kind(like)),
                key=lambda number: self._idle[number].size,
                default=None,
            )
            if found is not None:
                return self._idle.pop(found)[:size]
            if self._idle:  # replaced by the larger one
                self._idle.pop(0)
        array: Array = np.empty_like(like, shape=(size,))
        return array[:size]

    def give_back(self, array: Array) -> None:
        """Return an array from ``lend`` to the pool."""
        whole: Array = array if array.base is None else array.base
        with self._lock:
            self._idle.append(whole)


def _kind(array: Array) -> tuple[object, ...]:
    return type(array), array.dtype, getattr(array, "device", None)  # NumPy 1 arrays have no ``device``


# Buckets are exchanged one at a time, so that a few arrays serve all of them.
SCRATCH = Scratch()
