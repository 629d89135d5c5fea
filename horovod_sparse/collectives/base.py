"""What the collectives have in common."""

from __future__ import annotations

from mpi4py import MPI

from horovod_sparse.collectives.exchange import Exchange, Traffic
from horovod_sparse.collectives.messenger import Messenger
from horovod_sparse.vector import SparseVector


class Base:
    """A collective on a messenger of its own, with the way that vectors without indices take.

    Args:
        comm: The communicator of the ranks that take part.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._messenger = Messenger(comm)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received so far."""
        return self._messenger.traffic

    def entries(self, size: int, k: int) -> int:
        """As many entries as the configuration says."""
        del size
        return k

    def allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the ranks' vectors; those without indices densely, whatever the algorithm.

        Args:
            vector: This rank's vector; not changed. All ranks' have indices, or none has.
            k: Entries that a total has where the algorithm limits them; the same on every rank.
        """
        if vector.indices is not None:
            return self._allreduce(vector, k)
        return Exchange(SparseVector.full(self._messenger.sum(vector.values)), vector.nothing())

    def _allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums vectors with indices."""
        raise NotImplementedError
