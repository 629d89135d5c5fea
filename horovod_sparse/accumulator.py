"""Residual and gradients of one bucket, before and after they are added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.kernels import kernels_for, largest_magnitude, to_device
from horovod_sparse.kernels.types import Array, Indices, Moments, Segments, Velocity
from horovod_sparse.vector import SparseVector

# Elements of the zeros that stand for what is settled, again and again: contiguous, which the kernels read fastest, and
# small enough to stay in a cache.
_ZEROS = 2**16


class Accumulator:
    """acc = scale * source + gradients, added up as late as possible.

    A sparsifier with a fused kernel adds, selects and writes what is left in one pass over memory
    (12 bytes an element); any other calls ``settle()`` first and works on ``buffer``.

    Args:
        buffer: Takes acc.
        gradients: The gradients to add.
        scale: Factor on the source; 0 means that its content is ignored, even NaN.
        source: What acc is made of; it stays as it is. None: the buffer's own content.
        clear: The gradients' arrays may be left with zeros.
        velocity: Of momentum that is applied to the gradients; None: they are added as they are.

    Attributes:
        buffer: Shape (n,), float32 or float64. Once settled it holds acc.
        gradients: The gradients still to be added; once settled, only where they lie matters.
        size: Number of elements of the bucket.
        cleared: Tells that the gradients' arrays hold zeros, as they do where that cost no pass of its own.
    """

    def __init__(
        self,
        buffer: Array,
        gradients: Segments,
        scale: float = 1.0,
        *,
        source: Array | None = None,
        clear: bool = False,
        velocity: Velocity | None = None,
    ) -> None:
        self.buffer = buffer
        self.gradients = gradients
        self.scale = scale
        self.settled = False
        self.cleared = False
        self.size = int(buffer.size)
        self._source = source
        self._clear = clear
        self._velocity = velocity
        self._largest: Array | None = None  # values that left when everything was added up, the largest among them
        self._kernels = kernels_for(buffer)

    @property
    def active_size(self) -> int:
        """Number of elements that take part in this step, without those held."""
        return sum(int(gradient.size) for _, gradient in self.gradients)

    def settle(self) -> Array:
        """Adds up what is pending and returns the buffer."""
        if not self.settled:
            gradients, options = self._pending()
            self._kernels.accumulate(gradients, self.buffer, **options)
        return self.buffer

    def magnitude(self, vector: SparseVector) -> float:
        """The largest magnitude of all that takes part in this step, infinity where there is NaN; settles.

        Where the largest ones were taken when everything was added up, they tell it alone. Elsewhere this is a pass
        over the buffer.

        Args:
            vector: What was taken.
        """
        if self._largest is not None:
            return largest_magnitude(self._largest)
        return max(map(largest_magnitude, [vector.values, *(array for _, array in self.active())]))

    def moments(self, threads: int = 1) -> Moments:
        """Adds up what is pending and, in the same pass, the statistics of what takes part in this step."""
        if self._source is not None or self._velocity is not None:
            self.settle()
        self._clear = False  # which this kernel does not
        pending, options = self._pending()
        moments: Moments = self._kernels.accumulate_moments(pending, self.buffer, options["scale"], threads)
        return moments

    def sample(self, start: int, stride: int) -> Array:
        """Every stride-th value that takes part in this step; without momentum, nothing is added up for it.

        Args:
            start: Number of the first one; below the stride.
            stride: From one to the next.

        Returns:
            The values of acc, in the buffer's dtype.
        """
        if self._velocity is not None:
            self.settle()
        if self.settled:
            pending, scale, source = self._zeros(), 1.0, self.buffer
        else:
            pending, scale, source = self.gradients, self.scale, self.buffer if self._source is None else self._source
        values: Array = self._kernels.sample(pending, source, scale, start, stride)
        return values

    def count_reaching(self, thresholds: Sequence[float], threads: int = 1) -> list[int]:
        """Numbers of entries that ``take_above`` would take for each of at most 16 thresholds, in one pass; settles."""
        buffer = self.settle()
        wide = np.array(thresholds, np.float64)
        counts: list[int] = self._kernels.count_reaching(self.gradients, buffer, wide, threads).tolist()
        return counts

    def block_scores(self, block: int, threads: int = 1) -> Array:
        """Sum of the squares in each block of positions, of what takes part in this step; settles.

        Args:
            block: Positions of a block; the last one may have fewer.
            threads: Threads of the kernel; the result does not depend on it.

        Returns:
            The scores, on the buffer's device, float64 [ceil(n / block)].
        """
        buffer = self.settle()
        scores: Array = self._kernels.block_scores(self.gradients, buffer, block, threads)
        return scores

    def take_largest(self, k: int, threads: int = 1) -> SparseVector:
        """Moves the k largest magnitudes out of the buffer, fused with what is pending.

        Args:
            k: Number of entries; fewer are returned where fewer positions are covered by segments.
            threads: Threads of the kernel; the result does not depend on it.

        Returns:
            The entries taken. Their positions in the buffer are 0 afterwards.
        """
        first = not self.settled and k > 0
        pending, options = self._pending()
        indices, values = self._kernels.select(pending, self.buffer, k, threads=threads, **options)
        if first:
            self._largest = values
        return SparseVector(indices, values, self.size)

    def take_above(self, threshold: float, threads: int = 1) -> SparseVector:
        """Moves every magnitude of at least ``threshold`` out of the buffer, fused with what is pending.

        Args:
            threshold: Not negative.
            threads: Threads of the kernel; the result does not depend on it.

        Returns:
            The entries taken. Their positions in the buffer are 0 afterwards.
        """
        first = not self.settled
        pending, options = self._pending()
        indices, values = self._kernels.select_above(pending, self.buffer, threshold, threads=threads, **options)
        if first:
            self._largest = values
        return SparseVector(indices, values, self.size)

    def take_at(self, positions: Indices, shared: bool) -> SparseVector:
        """Moves the entries at given positions out of the buffer.

        Args:
            positions: int32 [m], ascending and unique, on any device. Those that are held stay, and travel as zeros.
            shared: Whether every rank takes the same positions.

        Returns:
            An entry for every position.
        """
        buffer = self.settle()
        positions = to_device(positions, buffer)
        values = self._kernels.take(self.gradients, buffer, positions)
        return SparseVector(positions, values, self.size, shared)

    def put_back(self, vector: SparseVector) -> None:
        """Moves entries that were taken into the buffer again."""
        self._kernels.add(vector.indices, vector.values, self.buffer)

    def keep_largest(self, vector: SparseVector, k: int) -> SparseVector:
        """The k largest magnitudes of a vector that was taken; the others are put back."""
        largest, rest = vector.cut(k)
        self.put_back(rest)
        return largest

    def take_all(self) -> SparseVector:
        """Moves everything out of the buffer but what lies at held positions, as a vector without indices."""
        buffer = self.settle()
        values = self._kernels.take(self.gradients, buffer, None)
        return SparseVector.full(values)

    def active(self) -> Segments:
        """The parts of the buffer that take part in this step, without those held; settles it."""
        buffer = self.settle()
        return [(start, buffer[start : start + gradient.size]) for start, gradient in self.gradients]

    def _pending(self) -> tuple[Segments, dict[str, Any]]:
        """Segments that the caller adds up, with options of the kernels; zeros where everything is added up already."""
        if self.settled:
            return self._zeros(), {"scale": 1.0}
        self.settled, self.cleared = True, self._clear
        how = {"source": self._source, "clear": self._clear, "velocity": self._velocity}
        return self.gradients, {"scale": self.scale, **how}

    def _zeros(self) -> Segments:
        """Zeros where the gradients lie."""
        zeros = np.zeros_like(self.buffer, shape=(min(_ZEROS, self.size),))
        return [
            (start + done, zeros[: gradient.size - done])
            for start, gradient in self.gradients
            for done in range(0, gradient.size, _ZEROS)
        ]
