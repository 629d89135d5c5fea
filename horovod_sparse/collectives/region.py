"""Region of positions whose sums one rank owns: its own residual there, and the entries of the other ranks."""

from __future__ import annotations

import numpy as np

from horovod_sparse.kernels import copied, kernels_for
from horovod_sparse.kernels.types import Segments
from horovod_sparse.rules import Accumulator, SparseVector


class Region:
    """Sums of a region, from which the owner takes those that it sends; its own residual does not change.

    Args:
        begin: First position of the region.
        own: What the owner holds of the region, with positions from 0. In its gaps, where nothing of this rank takes
            part, it is added only to sums other than 0 that have arrived.
        arrived: Sums of what all ranks have sent, in positions of the bucket.

    Attributes:
        sums: The sums, as an array of the region's length, without those that were taken.
        size: Number of elements of the bucket.
    """

    def __init__(self, begin: int, own: Accumulator, arrived: SparseVector) -> None:
        self.size, self.sums = arrived.size, copied(own.buffer)
        self._begin, self._held, self._arrived = begin, own.buffer, arrived
        self._kernels = kernels_for(self.sums)
        indices, values = arrived.entries
        places = self._kernels.shifted(indices, -begin)
        gaps = [(start, self.sums[start:end]) for start, end in _gaps(own.gradients, own.size)]
        if gaps:
            given = places[values != 0]  # random selections have zeros at the positions of frozen parameters
            there = self._kernels.take(gaps, self.sums, given)
            for _, gap in gaps:
                gap[...] = 0
            self._kernels.add(given, there, self.sums)
        self._kernels.add(places, values, self.sums)

    def take_above(self, threshold: float) -> SparseVector:
        """Move all sums out whose magnitudes reach a threshold; zeros stay."""
        least = max(threshold, float(np.finfo(self.sums.dtype).smallest_subnormal))
        everything = Accumulator(self.sums, [(0, self.sums)])
        everything.settled = True
        places, values = everything.take_above(least).entries
        return SparseVector(self._kernels.shifted(places, self._begin), values, self.size)

    def returned(self, sent: SparseVector) -> SparseVector:
        """Return the change of the owner's residual if it sends these sums.

        That is what has arrived elsewhere, and the owner's part of the sums that it sends, with the opposite sign.
        """
        indices, _ = sent.entries
        places = self._kernels.shifted(indices, -self._begin)
        gone = SparseVector(indices, self._kernels.gathered(self._held, places, -1.0), self.size)
        return self._arrived.without(sent).plus(gone)


def _gaps(segments: Segments, size: int) -> list[tuple[int, int]]:
    """Return begin and end of the positions below ``size`` between segments."""
    ends = [0, *(start + array.size for start, array in segments)]
    starts = [*(start for start, _ in segments), size]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
