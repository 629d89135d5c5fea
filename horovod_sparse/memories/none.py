"""No error feedback: the rest is dropped. The baseline that shows why feedback is needed."""

from __future__ import annotations

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels.types import Array, Segments
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class NoMemory(Stateless):
    """Forgets what was not sent; its buffer is scratch for the selection.

    Args:
        size: Number of elements n of the bucket.
        like: Array whose dtype and device the buffer takes.
    """

    def __init__(self, size: int, like: Array) -> None:
        self._scratch = np.zeros(size, like.dtype, like=like)

    def open(self, gradients: Segments, scale: float) -> Accumulator:
        """Accumulates the gradients alone: scale 0 ignores the buffer's old content."""
        del scale
        return Accumulator(self._scratch, gradients, scale=0.0)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Drops the rest and what came back."""
