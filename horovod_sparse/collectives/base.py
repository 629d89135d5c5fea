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
        wire: Format in which the values of vectors with indices travel: "float32", "float16" or "bfloat16"; None: as
            they are. What rounding takes away is returned on the rank that rounds.

    Raises:
        ValueError: The format is unknown.
    """

    def __init__(self, comm: MPI.Intracomm, *, wire: str | None = None) -> None:
        self._messenger = Messenger(comm, wire)

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
        if vector.indices is None:
            return Exchange(SparseVector.full(self._messenger.sum(vector.values)), vector.nothing())
        rounded, error = self._messenger.wire.round(vector)
        exchange = self._allreduce(rounded, k)
        return Exchange(exchange.total, exchange.returned.plus(error))

    def _allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums vectors with indices, whose values the wire's format holds."""
        raise NotImplementedError
