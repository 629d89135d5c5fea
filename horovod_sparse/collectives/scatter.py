"""Sparse reduce-scatter: the first half of TopkDSA, for models whose gradients are sharded like their parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.rounded import sum_parts
from horovod_sparse.collectives.split import regions, split_reduce
from horovod_sparse.kernels import joined
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import Accumulator, Reduced, SparseVector, Stateless
from horovod_sparse.wire import Wire

_THROTTLE = 4  # concurrent exchanges


class ReduceScatter(Stateless, Base):
    """Sums P equal regions, each on the rank that owns it; 2 k (P-1)/P words per rank.

    The total of a rank holds its own region only. What the owner holds there needs no message, so all of it is in the
    total, and other ranks' entries are added to it. Not in the registry, as it is no allreduce: see
    ``BucketContext.scatters``.

    Where all ranks select the same positions, or everything, only values are sent.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """The common options of sparse collectives."""

    choice = "reduce_scatter"  # for statistics

    def region(self, size: int) -> tuple[int, int]:
        """Return begin and end of this rank's region; ``size`` must be a multiple of the world size."""
        width = size // self._transport.size
        return self._transport.rank * width, (self._transport.rank + 1) * width

    def allreduce(self, vector: SparseVector, k: int) -> Reduced:
        """Sum the ranks' vectors in this rank's region."""
        if vector.indices is None or (vector.shared and not self._wire.format.rounds):
            return self._sum_values(vector)
        return self._allreduce_rounded(vector, k, self._allreduce)

    def allreduce_owned(self, vector: SparseVector, k: int, own: Accumulator) -> Reduced:
        """Sum the ranks' vectors in this rank's region, and all that the rank itself holds there."""
        begin, _ = self.region(vector.size)
        arrived = self._allreduce_rounded(vector, k, self._allreduce)
        active = own.active()
        if not active:
            return arrived
        places = [
            np.arange(begin + start, begin + start + part.size, dtype=np.int32, like=part) for start, part in active
        ]
        mine = SparseVector(joined(places), joined([part for _, part in active]), vector.size)
        return Reduced(mine.plus(arrived.total), arrived.returned.plus(mine.times(-1)))

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Reduced:
        del k  # nothing is dropped
        sums = split_reduce(self._transport, wire, vector, self._boundaries(vector.size), _THROTTLE)
        return Reduced(SparseVector(*sums, vector.size), vector.nothing())

    def _sum_values(self, vector: SparseVector) -> Reduced:
        """Sum vectors with the same positions on every rank; nothing is rounded."""
        begin, end = self.region(vector.size)
        if vector.indices is None:
            indices = np.arange(begin, end, dtype=np.int32, like=vector.values)
            parts = list(vector.values.reshape(self._transport.size, -1))
        else:
            split = regions(vector, self._boundaries(vector.size))
            indices, parts = split[self._transport.rank][0], [values for _, values in split]
        total = SparseVector(indices, sum_parts(self._transport, self._wire.exact, parts), vector.size)
        return Reduced(total, vector.nothing())

    def _boundaries(self, size: int) -> Array:
        return np.arange(self._transport.size + 1, dtype=np.int64) * (size // self._transport.size)
