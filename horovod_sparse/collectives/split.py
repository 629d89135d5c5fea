"""Split and reduce: every rank becomes the owner of a region of positions and sums everybody's entries there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from horovod_sparse.kernels import kernels_for, to_device, to_host
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import SparseVector
from horovod_sparse.wire import Entries, Wire

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Receiving, Transport


def split_reduce(transport: Transport, wire: Wire, vector: SparseVector, boundaries: Array, throttle: int) -> Entries:
    """Sums all ranks' entries of this rank's region.

    Step i goes to rank + i and comes from rank - i, so that no rank is everybody's target at once. ``throttle`` steps
    are under way at a time, and what they brought is merged while the next ones travel.

    Args:
        transport: Of the ranks that take part.
        wire: Format of the messages, which holds the values.
        vector: This rank's vector, with indices.
        boundaries: Integers [ranks + 1], ascending from 0 to vector.size: region r is boundaries[r] .. [r + 1].
        throttle: Exchanges under way at a time, at least 1.

    Returns:
        Indices and sums. Each owner adds in an order of its own, which depends on nothing but P and throttle.
    """
    parts = _regions(vector, boundaries)
    merge = kernels_for(vector.values).merge_sum
    sums, sends = [parts[transport.rank]], []
    group: Sequence[Receiving] = ()
    for first in range(1, transport.size, throttle):
        arrived = wire.unpack_all([one.wait() for one in group], vector.size) if group else []
        steps = range(first, min(first + throttle, transport.size))
        owners = [(transport.rank + i) % transport.size for i in steps]
        sends += transport.send_all(map(wire.pack, map(parts.__getitem__, owners)), owners, vector.values)
        if arrived:
            sums.append(merge(arrived, vector.size))
        group = [transport.receive((transport.rank - i) % transport.size, vector.values) for i in steps]
    if group:
        sums.append(merge(wire.unpack_all([one.wait() for one in group], vector.size), vector.size))
    for one in sends:
        one.wait()
    entries: Entries = merge(sums, vector.size)
    return entries


def _regions(vector: SparseVector, boundaries: Array) -> list[Entries]:
    """The vector's entries by region."""
    indices, values = vector.entries
    inner = np.searchsorted(indices, to_device(boundaries[1:-1].astype(np.int32), indices))
    cuts = [0, *to_host(inner).tolist(), len(vector)]
    return [(indices[begin:end], values[begin:end]) for begin, end in itertools.pairwise(cuts)]
