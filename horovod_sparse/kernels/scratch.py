"""Arrays of a bucket's size that are needed only during a step."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.types import Array

# Below, the allocator of NumPy and the C library reuses memory itself.
_LEAST_BYTES = 1 << 16


class Scratch:
    """Pool of memory that is used again once no array refers to it, as CuPy's; for NumPy arrays.

    Fresh memory costs a page fault every 4 KiB, which takes longer than most of the work done in it. The pool keeps as
    many blocks as were in use at the same time.
    """

    def __init__(self) -> None:
        self._idle: dict[int, NDArray[np.uint8]] = {}  # by id; single operations, as any thread may return memory

    def empty(self, size: int, like: Any, dtype: Any = None) -> Array:
        """Return an uninitialized array [size] on the device of ``like`` and, by default, with its dtype."""
        own = like.dtype if dtype is None else np.dtype(dtype)
        if size * own.itemsize < _LEAST_BYTES or not isinstance(like, np.ndarray):
            return np.empty_like(like, dtype=own, shape=(size,))
        block = self._block(size * own.itemsize)
        # NumPy lets views of an array refer to this array, not to the block, so that it is deleted after all of them.
        array: Array = np.frombuffer(block.data, own, size)
        weakref.finalize(array, self._idle.__setitem__, id(block), block).atexit = False
        return array

    def _block(self, nbytes: int) -> NDArray[np.uint8]:
        idle = sorted(self._idle.values(), key=len)
        for block in idle:
            if block.size >= nbytes and self._idle.pop(id(block), None) is not None:
                return block
        if idle:  # replaced by a larger one
            self._idle.pop(id(idle[0]), None)
        return np.empty(nbytes, np.uint8)


# Buckets are exchanged one at a time, so that a few blocks serve all of them.
SCRATCH = Scratch()
