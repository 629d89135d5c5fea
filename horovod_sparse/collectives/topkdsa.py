"""TopkDSA: each rank sums one region, then the regions are allgathered, sparse or dense.

Renggli et al., "SparCML" (SC 2019), dynamic sparse allreduce by split and allgather; between 4 k (P-1)/P and
(2 k + n) (P-1)/P words per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.split import split_reduce
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import Reduced, SparseVector, Stateless
from horovod_sparse.rules.options import integer
from horovod_sparse.wire import Entries, Wire, concatenate


class TopkDSA(Stateless, Base):
    """Split and reduce over equal regions, then an allgather; nothing is dropped.

    A region is sent as a dense array if that takes no more bytes. Sums are rounded by their owner.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """Options of TopkDSA.

        Attributes:
            throttle: Number of concurrent exchanges during split and reduce.
        """

        throttle: int = integer(4, least=1)

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Reduced:
        """Sum the ranks' vectors; the total has no indices if all regions were sent dense."""
        del k  # nothing is dropped
        transport = self._transport
        width = -(-vector.size // transport.size)
        boundaries = np.minimum(np.arange(transport.size + 1, dtype=np.int64) * width, vector.size)
        sums = split_reduce(transport, wire, vector, boundaries, self._options.throttle)
        mine, error, wire = self._round(SparseVector(*sums, vector.size))
        begin, end = boundaries[transport.rank : transport.rank + 2].tolist()
        message = wire.pack(mine.entries)
        dense = wire.nbytes_all(end - begin) <= message.nbytes
        if dense:
            message = wire.pack_all(_write_out(mine.entries, begin, end), begin)
        messages, everyones = transport.allgather_slots(message, self._slots, dense)
        indices, values = concatenate(wire.unpack_all(messages, vector.size))
        total = SparseVector.full(values) if all(everyones) else SparseVector(indices, values, vector.size, shared=True)
        return Reduced(total, vector.nothing() if error is None else error)


def _write_out(entries: Entries, begin: int, end: int) -> Array:
    """Return the region begin .. end as a dense array."""
    indices, values = entries
    region = np.zeros(end - begin, values.dtype, like=values)
    kernels_for(region).add(indices - np.int32(begin), values, region)
    return region
