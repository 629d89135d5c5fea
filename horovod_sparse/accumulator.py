"""Residual and gradients of one bucket, before and after they are added up."""

from __future__ import annotations

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
        if self.settled:
            raise RuntimeError("the accumulator is settled: its gradients were added up already")
        kernels = kernels_for(self.buffer)
        indices, values = kernels.select(self.gradients, self.buffer, k, self.scale, threads)
        self.settled = True
        return SparseVector(indices, values, self.size)
