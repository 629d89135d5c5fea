"""Split and reduce: every rank owns a region of positions and sums all ranks' entries in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import SparseVector
from horovod_sparse.wire import Entries, Wire

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Receiving, Transport


def split_reduce(transport: Transport, wire: Wire, vector: SparseVector, boundaries: Array, throttle: int) -> Entries:
    """Sum all ranks' entries in this rank's region.

    Step i sends to rank + i and receives from rank - i, so that no rank is the target of all others at once.
    ``throttle`` steps are in flight at a time; what they received is merged while the next ones are in flight.

    Args:
        transport: Transport of the participating ranks.
        wire: Message format that holds the values exactly.
        vector: Vector of this rank, with indices.
        boundaries: Integers [ranks + 1], ascending from 0 to vector.size; region r ends before boundaries[r + 1].
        throttle: Number of concurrent exchanges, at least 1.

    Returns:
        Indices and sums. The order of summation differs from owner to owner and depends only on P and ``throttle``.
    """
    parts = regions(vector, boundaries)
    merge = kernels_for(vector.values).merge_sum
    sums, sends = [parts[transport.rank]], []
    group: Sequence[Receiving] = ()
    for first in range(1, transport.size, throttle):
        arrived = wire.unpack_all([receiving.wait() for receiving in group], vector.size) if group else []
        steps = range(first, min(first + throttle, transport.size))
        owners = [(transport.rank + i) % transport.size for i in steps]
        sends += transport.send_all(map(wire.pack, map(parts.__getitem__, owners)), owners, vector.values)
        if arrived:
            sums.append(merge(arrived, vector.size))
        group = [transport.receive((transport.rank - i) % transport.size, vector.values) for i in steps]
        transport.traffic.rounds += 1
    if group:
        sums.append(merge(wire.unpack_all([receiving.wait() for receiving in group], vector.size), vector.size))
    for sending in sends:
        sending.wait()
    return merge(sums, vector.size)


def regions(vector: SparseVector, boundaries: Array) -> list[Entries]:
    """Return the vector's entries in each region; ``boundaries`` are those of ``split_reduce``."""
    indices, values = vector.entries
    cuts = [0, *kernels_for(indices).places(indices, boundaries[1:-1].astype(np.int32)).tolist(), len(vector)]
    return [(indices[begin:end], values[begin:end]) for begin, end in itertools.pairwise(cuts)]
