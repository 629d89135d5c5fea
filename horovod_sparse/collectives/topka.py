"""TopkA: every rank gathers all ranks' entries and sums them.

Renggli et al., "SparCML" (SC 2019), sparse allgather; 2 k (P-1) words per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.collectives.base import Base
from horovod_sparse.rules import Reduced, SparseVector, Stateless
from horovod_sparse.wire import Wire


class TopkA(Stateless, Base):
    """Allgathers indices and values, and merges them in rank order; nothing is dropped."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """The common options of sparse collectives."""

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Reduced:
        """Sum the ranks' vectors, whose numbers of entries may differ or be 0."""
        del k  # nothing is dropped
        messages, _ = self._transport.allgather_slots(wire.pack(vector.entries), self._slots)
        vectors = wire.unpack_all(messages, vector.size)
        indices, values = self._kernels.merge_sum(vectors, vector.size)
        return Reduced(SparseVector(indices, values, vector.size, shared=True), vector.nothing())
