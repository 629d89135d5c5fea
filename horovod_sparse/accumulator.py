"""Residual and gradients of one bucket, before and after they are added up."""

from __future__ import annotations

import numpy as np

from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array, Segments
from horovod_sparse.vector import SparseVector


class Accumulator:
    """acc = scale * buffer + gradients, added up as late as possible.

    A sparsifier with a fused kernel adds, selects and writes what is left in one pass over memory
    (12 bytes an element); any other calls ``settle()`` first and works on ``buffer``.

    Attributes:
        buffer: Shape (n,), float32 or float64. Once settled it holds acc.
        gradients: The gradients still to be added; empty once settled.
        scale: Factor on the buffer's old content; 0 means that the old content is ignored, even NaN.
    """

    def __init__(self, buffer: Array, gradients: Segments, scale: float = 1.0) -> None:
        self.buffer = buffer
        self.gradients = gradients
        self.scale = scale
        self.settled = False

    @property
    def size(self) -> int:
        """Number of elements of the bucket."""
        return int(self.buffer.size)

    def settle(self) -> Array:
        """Adds up what is pending and returns the buffer."""
        if not self.settled:
            kernels_for(self.buffer).accumulate(self.gradients, self.buffer, self.scale)
            self.settled = True
        return self.buffer

    def take_largest(self, k: int, threads: int = 1) -> SparseVector:
        """Moves the k largest magnitudes out of the buffer, fused with what is pending.

        Args:
            k: Number of entries; fewer are returned where fewer positions are covered by segments.
            threads: Threads of the kernel; the result does not depend on it.

        Returns:
            The entries taken. Their positions in the buffer are 0 afterwards.
        """
        pending, scale = self._pending()
        indices, values = kernels_for(self.buffer).select(pending, self.buffer, k, scale, threads)
        return SparseVector(indices, values, self.size)

    def take_above(self, threshold: float, threads: int = 1) -> SparseVector:
        """Moves every magnitude of at least ``threshold`` out of the buffer, fused with what is pending.

        Args:
            threshold: Not negative.
            threads: Threads of the kernel; the result does not depend on it.

        Returns:
            The entries taken. Their positions in the buffer are 0 afterwards.
        """
        pending, scale = self._pending()
        indices, values = kernels_for(self.buffer).select_above(pending, self.buffer, threshold, scale, threads)
        return SparseVector(indices, values, self.size)

    def take_all(self) -> SparseVector:
        """Moves everything out of the buffer but what lies at held positions, as a vector without indices."""
        buffer = self.settle()
        values = np.zeros_like(buffer)
        for start, gradient in self.gradients:
            part = slice(start, start + gradient.size)
            values[part] = buffer[part]
            buffer[part] = 0
        return SparseVector.full(values)

    def _pending(self) -> tuple[Segments, float]:
        """What a fused kernel is to add up; zeros, in no memory of their own, where everything is added up already."""
        if self.settled:
            zero = np.zeros((), self.buffer.dtype, like=self.buffer)
            return [(start, np.broadcast_to(zero, gradient.shape)) for start, gradient in self.gradients], 1.0
        self.settled = True
        return self.gradients, self.scale
