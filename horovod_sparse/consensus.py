"""How all ranks decide alike: by numbers that are summed over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from horovod_sparse.kernels import to_device, to_host
from horovod_sparse.kernels.types import Array

if TYPE_CHECKING:
    from mpi4py import MPI

# Sums a small array, of any device, over the ranks, with the same bits on all of them; the identity on one rank.
Consensus: TypeAlias = Callable[[Array], Array]


def consensus_of(comm: MPI.Intracomm) -> Consensus:
    """The sum over a communicator's ranks; a collective call each time."""

    def consensus(array: Array) -> Array:
        mine = to_host(array)
        total = np.empty_like(mine)
        if np.issubdtype(mine.dtype, np.integer):
            comm.Allreduce(mine, total)
        else:  # MPI recommends, but does not promise, that Allreduce rounds alike on every rank
            comm.Reduce(mine, total)
            comm.Bcast(total)
        return to_device(total, array)

    return consensus
