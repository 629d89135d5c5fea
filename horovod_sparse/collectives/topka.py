"""TopkA: every rank gathers every rank's entries and sums them up itself.

Renggli et al., "SparCML" (SC 2019), sparse allgather; 2 k (P-1) words per rank.
"""

from __future__ import annotations

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.exchange import Exchange
from horovod_sparse.kernels import kernels_for
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class TopkA(Stateless, Base):
    """Allgather of the lengths, one of indices and values, and a merge in rank order; nothing is dropped.

    Args:
        comm: The communicator of the ranks that take part.
        wire: Format in which values travel; None: as they are.

    Raises:
        ValueError: The format is unknown.
    """

    def _allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the ranks' vectors, which may have different numbers of entries, or none."""
        del k  # nothing is dropped
        wire = self._messenger.wire
        message = wire.pack(vector.entries)
        lengths = self._messenger.share(message.nbytes)[:, 0].tolist()
        vectors = [wire.unpack(one, vector.values.dtype) for one in self._messenger.allgather(message, lengths)]
        indices, values = kernels_for(vector.values).merge_sum(vectors, vector.size)
        return Exchange(SparseVector(indices, values, vector.size, shared=True), vector.nothing())
