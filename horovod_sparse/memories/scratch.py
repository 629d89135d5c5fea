"""Arrays of a bucket's size that are needed during a step only: one for all buckets, not one for each."""

from __future__ import annotations

import threading

import numpy as np

from horovod_sparse.kernels.types import Array


class Scratch:
    """Lends arrays, and keeps the largest one that came back for the next step.

    Fresh memory costs a page fault every 4 KiB: as much time as the work that is done in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: Array | None = None

    def lend(self, size: int, like: Array) -> Array:
        """An array [size] of undefined content, with the dtype and on the device of ``like``."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is None or idle.size < size or _kind(idle) != _kind(like):
            idle = np.empty_like(like, shape=(size,))
        return idle[:size]

    def give_back(self, array: Array) -> None:
        """Ends the use of an array that ``lend`` gave."""
        whole: Array = array if array.base is None else array.base
        with self._lock:
            if self._idle is None or self._idle.nbytes < whole.nbytes:
                self._idle = whole


def _kind(array: Array) -> tuple[object, ...]:
    return type(array), array.dtype, getattr(array, "device", None)  # NumPy 1 does not name the host


# Buckets take their turns, so that one array serves all of them.
SCRATCH = Scratch()
