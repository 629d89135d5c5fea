"""Scratch buffers of a bucket's size, needed only during a step and shared by all buckets."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from horovod_sparse.kernels.types import Array


class Scratch:
    """Pool that lends arrays, and keeps the number that were lent at the same time.

    Fresh memory costs a page fault every 4 KiB, which takes as long as the work done in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[tuple[object, ...], Array]] = []  # kind, and array

    def lend(self, size: int, like: Array) -> Array:
        """Return an uninitialized array [size] with the dtype and on the device of ``like``."""
        kind = _kind(like)
        with self._lock:
            fitting = [number for number, (own, idle) in enumerate(self._idle) if own == kind and idle.size >= size]
            if fitting:
                return self._idle.pop(min(fitting, key=lambda number: self._idle[number][1].size))[1][:size]
            if self._idle:  # replaced by the larger one
                self._idle.pop(0)
        array: Array = np.empty_like(like, shape=(size,))
        return array[:size]

    def give_back(self, array: Array) -> None:
        """Return an array from ``lend`` to the pool."""
        whole: Array = array if array.base is None else array.base
        with self._lock:
            self._idle.append((_kind(whole), whole))


def _kind(array: Any) -> tuple[object, ...]:
    """Return what arrays that replace each other have in common: kernels of another stream may still use them."""
    if isinstance(array, np.ndarray):
        return np.ndarray, array.dtype
    import cupy

    return type(array), array.dtype, array.device, cupy.cuda.get_current_stream().ptr


# Buckets are exchanged one at a time, so that a few arrays serve all of them.
SCRATCH = Scratch()
