"""SharedIndices: where all ranks chose the same positions, only the values travel."""

from __future__ import annotations

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.exchange import Exchange
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class SharedIndices(Stateless, Base):
    """One MPI Allreduce of k values, 2 k (P-1)/P words; nothing is returned.

    Args:
        comm: The communicator of the ranks that take part.
    """

    def _allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the values.

        Raises:
            ValueError: The vector is not marked as one with the same indices on every rank.
        """
        del k  # nothing is dropped
        if not vector.shared:
            raise ValueError(
                f"rank {self._messenger.rank}: the ranks' vectors have different indices, but the collective 'shared' "
                "sums values alone: use a sparsifier whose indices are the same on every rank, such as 'randomblock'"
            )
        total = SparseVector(vector.indices, self._messenger.sum(vector.values), vector.size, shared=True)
        return Exchange(total, vector.nothing())
