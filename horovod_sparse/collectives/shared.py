"""SharedIndices: sends only values, for ranks that all select the same positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.rounded import sum_rounded
from horovod_sparse.rules import Reduced, SparseVector, Stateless
from horovod_sparse.wire import Wire

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport


class SharedIndices(Stateless, Base):
    """One allreduce of k values, 2 k (P-1)/P words; only rounding errors are returned.

    If values are rounded, each rank sums a part of them in full precision and in rank order, and the rounded sums are
    gathered. That takes the same number of words, in the wire's format.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """The common options of sparse collectives."""

        shared_indices = True

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Reduced:
        """Sum the values; raise ValueError if the vector is not marked as having the same indices on every rank."""
        del k  # nothing is dropped
        if not vector.shared:
            raise ValueError(
                f"rank {self._transport.rank}: the ranks' vectors have different indices, but the collective 'shared' "
                "sums values only: use a sparsifier whose indices are the same on every rank, such as 'randomblock'"
            )
        return sum_values(self._transport, wire, vector)

    def _choose_coding(self, vector: SparseVector, k: int) -> None:
        """Do nothing: no indices are sent."""


def sum_values(transport: Transport, wire: Wire, vector: SparseVector) -> Reduced:
    """Sum vectors with the same indices on every rank, whose values ``wire`` holds exactly."""
    returned = vector.nothing()
    if wire.format.rounds:
        values, part, error = sum_rounded(transport, wire, vector.values)
        if error is not None:
            returned = SparseVector(vector.entries[0][part], error, vector.size)
    else:
        values = transport.allreduce(vector.values)
    return Reduced(SparseVector(vector.indices, values, vector.size, shared=True), returned)
