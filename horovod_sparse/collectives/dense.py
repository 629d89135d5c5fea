"""Dense allreduce: the baseline, and what Auto chooses on fast networks."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.exchange import Exchange
from horovod_sparse.kernels import kernels_for
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class Dense(Stateless, Base):
    """Sums whole buckets with one MPI Allreduce, 2 n (P-1)/P words; nothing is rounded or returned.

    Args:
        comm: The communicator of the ranks that take part.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm)

    def entries(self, size: int, k: int) -> int:
        """Everything: it costs no more than some of it."""
        del k
        return size

    def _allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Writes the vector out dense; the total holds every position."""
        values = np.zeros(vector.size, vector.values.dtype, like=vector.values)
        kernels_for(values).add(vector.indices, vector.values, values)
        return self.allreduce(SparseVector.full(values), k)
