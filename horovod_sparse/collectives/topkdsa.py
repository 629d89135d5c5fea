"""TopkDSA: each rank sums one region, then the regions are gathered, sparse or dense.

Renggli et al., "SparCML" (SC 2019), dynamic sparse allreduce by split and allgather; between 4 k (P-1)/P and
(2 k + n) (P-1)/P words per rank.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.exchange import Exchange
from horovod_sparse.collectives.split import check_throttle, split_reduce
from horovod_sparse.collectives.wire import Entries, Wire, concatenate
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class TopkDSA(Stateless, Base):
    """Split and reduce over equal regions, then an allgather; nothing is dropped.

    A region whose sums take fewer bytes as a dense array travels as one.

    Args:
        comm: The communicator of the ranks that take part.
        throttle: Exchanges under way at a time in the first half.
        wire: Format in which values travel; None: as they are. Sums are rounded by their owner.

    Raises:
        ValueError: throttle is below 1, or the format is unknown.
    """

    def __init__(self, comm: MPI.Intracomm, *, throttle: int = 4, wire: str | None = None) -> None:
        super().__init__(comm, wire=wire)
        self._throttle = check_throttle(throttle)

    def _allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the ranks' vectors; the total holds every position where all regions became dense."""
        del k  # nothing is dropped
        messenger, wire, dtype = self._messenger, self._messenger.wire, vector.values.dtype
        width = -(-vector.size // messenger.ranks)
        boundaries = np.minimum(np.arange(messenger.ranks + 1, dtype=np.int64) * width, vector.size)
        sums = split_reduce(messenger, vector, boundaries, self._throttle)
        mine, error = wire.round(SparseVector(*sums, vector.size))
        begin, end = boundaries[messenger.rank : messenger.rank + 2].tolist()
        dense = (end - begin) * wire.dtype(dtype).itemsize <= len(mine) * wire.entry(dtype)
        message = wire.write(_write_out(mine.entries, begin, end)) if dense else wire.pack(mine.entries)
        headers = messenger.share(message.nbytes, dense)
        messages = messenger.allgather(message, headers[:, 0].tolist())
        if headers[:, 1].all():
            total = SparseVector.full(np.concatenate([wire.read(one, dtype) for one in messages]))
            return Exchange(total, error)
        regions = zip(messages, headers[:, 1].tolist(), boundaries[:-1].tolist(), strict=True)
        indices, values = concatenate([_read(wire, *region, dtype) for region in regions])
        return Exchange(SparseVector(indices, values, vector.size, shared=True), error)


def _write_out(entries: Entries, begin: int, end: int) -> Array:
    """The region begin .. end as a dense array."""
    indices, values = entries
    region = np.zeros(end - begin, values.dtype, like=values)
    kernels_for(region).add(indices - np.int32(begin), values, region)
    return region


def _read(wire: Wire, message: Array, dense: int, begin: int, dtype: np.dtype[np.generic]) -> Entries:
    """The entries of a region that arrived; a dense one names every position."""
    if not dense:
        return wire.unpack(message, dtype)
    values = wire.read(message, dtype)
    return np.arange(begin, begin + values.size, dtype=np.int32, like=values), values
