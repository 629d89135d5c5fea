"""Dense allreduce: the baseline, and what a dense step runs."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives.exchange import Exchange, Traffic
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


def allreduce_dense(comm: MPI.Intracomm, values: Array, traffic: Traffic) -> Array:
    """MPI Allreduce (sum) of a whole vector.

    Args:
        comm: The communicator.
        values: Shape (n,), float32 or float64; not changed.
        traffic: Charged with 2 n (P-1)/P elements in 2 (P-1) messages, the ring's cost.

    Returns:
        The sum, a new array.
    """
    total = np.empty_like(values)
    comm.Allreduce(values, total)
    size = comm.Get_size()
    traffic.sent(2 * values.nbytes * (size - 1) / size, 2 * (size - 1))
    return total


class Dense(Stateless):
    """Sums the vectors as dense arrays with one MPI Allreduce; nothing is returned.

    Args:
        comm: The communicator of the ranks that take part.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.traffic = Traffic()

    def allreduce(self, vector: SparseVector) -> Exchange:
        """Writes the vector out dense and sums it; the total holds every position."""
        values = vector.values
        if vector.indices is not None:
            values = np.zeros(vector.size, vector.values.dtype, like=vector.values)
            kernels_for(values).add(vector.indices, vector.values, values)
        total = allreduce_dense(self._comm, values, self.traffic)
        return Exchange(SparseVector.full(total), SparseVector.empty(vector.size, vector.values))
