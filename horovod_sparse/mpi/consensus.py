"""Decisions that all ranks make alike: by numbers that are summed over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from horovod_sparse.kernels import to_device, to_host
from horovod_sparse.kernels.types import Array


def consensus_of(comm: MPI.Intracomm) -> Callable[[Array], Array]:
    """The sum of a small array over a communicator's ranks, with the same bits on all; a collective call each time."""

    def consensus(array: Any) -> Array:
        if not isinstance(array, np.ndarray):
            return to_device(consensus(to_host(array)), array)
        total = np.empty_like(array)
        if array.dtype.kind in "iu":
            comm.Allreduce(array, total)
        else:  # MPI recommends, but does not promise, that Allreduce rounds alike on every rank
            comm.Reduce(array, total)
            comm.Bcast(total)
        return total

    return consensus
