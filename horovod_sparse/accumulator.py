"""Lazy accumulation of the residual and gradients of one bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.kernels import kernels_for, largest_magnitude, packed, to_device
from horovod_sparse.kernels.scratch import SCRATCH
from horovod_sparse.kernels.types import Array, Indices, Moments, Segments, Velocity
from horovod_sparse.vector import SparseVector

# Elements of the zero array that replaces gradients already accumulated, as repeated segments: contiguous arrays are
# fastest to read, and this one is small enough to stay in a cache.
_ZEROS = 2**16


class Accumulator:
    """Lazy computation of acc = scale * source + gradients.

    A sparsifier with a fused kernel accumulates, selects and writes the remainder in one pass over memory (12 bytes per
    element). Any other sparsifier calls ``settle()`` first and works on ``buffer``.

    Args:
        source: Array to scale; not modified. None: the buffer itself.
        clear: Whether the gradients' arrays may be set to zero.
        velocity: Momentum to apply to the gradients; None: no momentum.
        empty: Whether the buffer is known to hold zeros only, and is the source.

    Attributes:
        buffer: Shape (n,), float32 or float64. Holds acc once settled.
        gradients: Gradients to add; once settled, only their ranges matter.
        scale: Factor of the source; with 0 its content is ignored, even NaN.
        settled: Whether the gradients have been added, so that ``buffer`` holds acc.
        size: Number of elements of the bucket.
        cleared: Whether the gradients' arrays were set to zero, which is done only if it takes no separate pass.
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
        empty: bool = False,
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
        self._empty = empty
        self._largest: Array | None = None  # values taken while settling; they include the largest
        self._outside: Accumulator | None = None  # has accumulated everything but the region
        self._region = slice(0, 0)
        self._kernels = kernels_for(buffer)

    @property
    def active_size(self) -> int:
        """Number of active elements in this step, that is, without held positions."""
        return sum(int(gradient.size) for _, gradient in self.gradients)

    def part(self, begin: int, end: int) -> Accumulator:
        """Return an accumulator of the active elements in positions begin .. end of the same buffer; settles."""
        part = Accumulator(self.settle(), clipped(self.gradients, begin, end))
        part.settled = True
        return part

    def outside(self, begin: int, end: int) -> Accumulator:
        """Return an accumulator of the active elements outside of positions begin .. end of the same buffer.

        It is settled before this one, which then adds what is left: ``settle`` of this one completes the sum.
        """
        assert not self.settled
        segments = [*clipped(self.gradients, 0, begin), *clipped(self.gradients, end, self.size)]
        outside = Accumulator(
            self.buffer, segments, self.scale, source=self._source, clear=self._clear, velocity=self._velocity
        )
        self._outside, self._region = outside, slice(begin, end)
        return outside

    def inside(self, zero: bool) -> Accumulator | None:
        """Return an accumulator of the active elements that ``outside`` leaves out; None if it was not called.

        Positions count from the region's begin. Settles.

        Args:
            zero: Return zeros instead of what the buffer holds.
        """
        if self._outside is None:
            return None
        self.settle()
        buffer = self.buffer[self._region]
        inside = Accumulator(np.zeros_like(buffer) if zero else buffer, self._in_region())
        inside.settled = True
        return inside

    def settle(self) -> Array:
        """Add the pending gradients and return the buffer."""
        if self._outside is not None and not self.settled:
            self._settle_inside(self._outside)
        elif not self.settled:
            gradients, options = self._pending()
            self._kernels.accumulate(gradients, self.buffer, **options)
        return self.buffer

    def _settle_inside(self, outside: Accumulator) -> None:
        """Add the gradients that ``outside`` leaves out; it has scaled the complete buffer."""
        outside.settle()
        region, velocity = self._region, self._velocity
        if velocity is not None:
            velocity = velocity._replace(values=velocity.values[region])
        self._kernels.accumulate(self._in_region(), self.buffer[region], 1.0, clear=self._clear, velocity=velocity)
        self.settled, self.cleared = True, self._clear and (outside.cleared or not outside.gradients)

    def _in_region(self) -> Segments:
        begin, end = self._region.start, self._region.stop
        return [(start - begin, part) for start, part in clipped(self.gradients, begin, end)]

    def magnitude(self, vector: SparseVector) -> float:
        """Return the largest magnitude of all active elements, infinity if there is a NaN; settles.

        If the largest values were taken while settling, only these are read. Otherwise this is a pass over the buffer
        and ``vector``, the entries that were taken.
        """
        if self._largest is not None:
            return largest_magnitude(self._largest)
        return max(map(largest_magnitude, [vector.values, *(array for _, array in self.active())]))

    def moments(self, threads: int = 1) -> Moments:
        """Settle and, in the same pass, return the moments of the active elements."""
        if self._source is not None or self._velocity is not None:
            self.settle()
        self._clear = False  # this kernel does not clear
        pending, options = self._pending()
        return self._kernels.accumulate_moments(pending, self.buffer, options["scale"], threads)

    def sample(self, start: int, stride: int) -> Array:
        """Return every stride-th active value of acc, in the buffer's dtype; settles only if there is momentum.

        Args:
            start: First value, counted over the active elements; below the stride.
            stride: Distance between values, counted over the active elements.
        """
        if self._velocity is not None:
            self.settle()
        if self.settled:
            pending, scale, source = self._zeros(), 1.0, self.buffer
        else:
            pending, scale, source = self.gradients, self.scale, self.buffer if self._source is None else self._source
        return self._kernels.sample(pending, source, scale, start, stride)

    def count_reaching(self, thresholds: Sequence[float], threads: int = 1) -> list[int]:
        """Count the entries that ``take_above`` would take for each of at most 16 thresholds, in one pass; settles."""
        buffer = self.settle()
        wide = np.array(thresholds, np.float64)
        counts: list[int] = self._kernels.count_reaching(self.gradients, buffer, wide, threads).tolist()
        return counts

    def tail(self, threshold: float, threads: int = 1) -> tuple[int, float]:
        """Return number and sum of the magnitudes that ``take_above`` would take; settles."""
        buffer = self.settle()
        tail: tuple[int, float] = self._kernels.tail(self.gradients, buffer, threshold, threads)
        return tail

    def block_scores(self, block: int, threads: int = 1) -> Array:
        """Return the sum of squares of the active elements in each block of positions; settles.

        Args:
            block: Positions per block; the last block may have fewer.
            threads: Number of kernel threads; the result does not depend on it.

        Returns:
            The scores, on the buffer's device, float64 [ceil(n / block)].
        """
        buffer = self.settle()
        return self._kernels.block_scores(self.gradients, buffer, block, threads)

    def take_largest(self, k: int, threads: int = 1) -> SparseVector:
        """Move the k largest magnitudes out of the buffer, fused with the pending accumulation.

        Args:
            k: Number of entries; fewer are returned if there are fewer active elements.
            threads: Number of kernel threads; the result does not depend on it.

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
        """Move all magnitudes that reach a threshold of 0 or more out of the buffer, as ``take_largest``."""
        first = not self.settled
        pending, options = self._pending()
        indices, values = self._kernels.select_above(pending, self.buffer, threshold, threads=threads, **options)
        if first:
            self._largest = values
        return SparseVector(indices, values, self.size)

    def take_at(self, positions: Indices, shared: bool) -> SparseVector:
        """Move the entries at given positions out of the buffer; return a vector with an entry for each of them.

        Args:
            positions: int32 [m], ascending and unique, on any device. Held positions keep their values in the buffer
                and get an entry of 0.
            shared: Whether every rank takes the same positions.
        """
        buffer = self.settle()
        positions = to_device(positions, buffer)
        values = self._kernels.take(self.gradients, buffer, positions)
        return SparseVector(positions, values, self.size, shared)

    def put_back(self, vector: SparseVector) -> None:
        """Add taken entries back to the buffer."""
        self._kernels.add(vector.indices, vector.values, self.buffer)

    def keep_largest(self, vector: SparseVector, k: int) -> SparseVector:
        """Return the k largest magnitudes of a taken vector, and put the rest back."""
        largest, rest = vector.cut(k)
        self.put_back(rest)
        return largest

    def take_all(self) -> SparseVector:
        """Move everything except held positions out of the buffer, and return it as a vector without indices."""
        if self._empty and not self.settled and self._outside is None:
            self.settled = True  # the buffer stays zero, so it need not be read or written
            return SparseVector.full(packed(self.gradients, SCRATCH.empty(self.size, self.buffer)))
        buffer = self.settle()
        values = self._kernels.take(self.gradients, buffer, None)
        return SparseVector.full(values)

    def active(self) -> Segments:
        """Return the active parts of the buffer, that is, without held positions; settles."""
        buffer = self.settle()
        return [(start, buffer[start : start + gradient.size]) for start, gradient in self.gradients]

    def _pending(self) -> tuple[Segments, dict[str, Any]]:
        """Return the segments that the caller must add, and kernel options; zero segments if already settled."""
        if self.settled:
            return self._zeros(), {"scale": 1.0}
        self.settled, self.cleared = True, self._clear
        how = {"source": self._source, "clear": self._clear, "velocity": self._velocity}
        return self.gradients, {"scale": self.scale, **how}

    def _zeros(self) -> Segments:
        """Return zero segments that cover the ranges of the gradients."""
        zeros = np.zeros_like(self.buffer, shape=(min(_ZEROS, self.size),))
        return [
            (start + done, zeros[: gradient.size - done])
            for start, gradient in self.gradients
            for done in range(0, gradient.size, _ZEROS)
        ]


def clipped(segments: Segments, begin: int, end: int) -> Segments:
    """Return the parts of segments in positions begin .. end."""
    return [
        (max(start, begin), array[max(begin - start, 0) : end - start])
        for start, array in segments
        if start < end and start + array.size > begin
    ]
