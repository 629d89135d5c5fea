"""Split and reduce: every rank becomes the owner of a region of positions and sums everybody's entries there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives.messenger import Entries, Messenger, pack, unpack
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array
from horovod_sparse.vector import SparseVector


def check_throttle(throttle: int) -> int:
    """The number given; ValueError if it is below 1."""
    if throttle < 1:
        raise ValueError(f"throttle must be at least 1, not {throttle}: it counts the exchanges under way at a time")
    return throttle


def split_reduce(messenger: Messenger, vector: SparseVector, boundaries: Array, throttle: int) -> Entries:
    """Sums all ranks' entries of this rank's region.

    Step i goes to rank + i and comes from rank - i, so that no rank is everybody's target at once. ``throttle`` steps
    are under way at a time, and what they brought is merged while the next ones travel.

    Args:
        messenger: Of the ranks that take part.
        vector: This rank's vector, with indices.
        boundaries: Integers [ranks + 1], ascending from 0 to vector.size: region r is boundaries[r] .. [r + 1].
        throttle: Exchanges under way at a time, at least 1.

    Returns:
        Indices and sums. Each owner adds in an order of its own, which depends on nothing but P and throttle.
    """
    assert vector.indices is not None
    cuts = [0, *np.searchsorted(vector.indices, boundaries[1:-1].astype(np.int32)).tolist(), len(vector)]
    parts = [(vector.indices[a:b], vector.values[a:b]) for a, b in itertools.pairwise(cuts)]
    merge = kernels_for(vector.values).merge_sum
    sums, sends = [parts[messenger.rank]], []
    group: Sequence[tuple[Array, MPI.Request]] = ()
    for first in range(1, messenger.ranks + throttle, throttle):
        for _, request in group:
            request.Wait()
        arrived = [unpack(message, vector.values.dtype) for message, _ in group]
        steps = range(first, min(first + throttle, messenger.ranks))
        sends += [_send(messenger, parts, (messenger.rank + i) % messenger.ranks) for i in steps]
        if arrived:
            sums.append(merge(arrived, vector.size))
        group = [messenger.receive((messenger.rank - i) % messenger.ranks) for i in steps]
    MPI.Request.Waitall(sends)
    entries: Entries = merge(sums, vector.size)
    return entries


def _send(messenger: Messenger, parts: Sequence[Entries], rank: int) -> MPI.Request:
    return messenger.send(pack(parts[rank]), rank)
