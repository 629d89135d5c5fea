"""Sum of arrays that are rounded for the wire: each rank sums one part in full precision, and rounds the sums."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from horovod_sparse.kernels.scratch import SCRATCH
from horovod_sparse.kernels.types import Array
from horovod_sparse.wire import Wire

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport


def sum_rounded(transport: Transport, wire: Wire, values: Array) -> tuple[Array, slice, Array | None]:
    """Sum arrays over the ranks, 2 n (P-1)/P words of the wire format.

    Args:
        transport: Transport of the participating ranks.
        wire: Wire that holds this rank's values exactly.
        values: Array of this rank [n], already rounded; the same length on every rank.

    Returns:
        The rounded sums, bitwise identical on every rank; the part of the array whose sums this rank has rounded; the
        rounding errors of this part, None if nothing was rounded.
    """
    cuts = [rank * values.size // transport.size for rank in range(transport.size + 1)]
    parts = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
    mine = parts[transport.rank]
    first, *others = _swap(transport, wire, [values[part] for part in parts])
    sums = functools.reduce(operator.iadd, others, first.copy())
    rounded, error, wire = wire.round(sums)
    lengths = [wire.nbytes_all(count) for count in np.diff(cuts).tolist()]
    messages = transport.allgather(wire.pack_all(rounded, mine.start), lengths)
    total = np.concatenate(wire.unpack_values(messages), out=SCRATCH.empty(values.size, values))
    return total, mine, error


def _swap(transport: Transport, wire: Wire, parts: Sequence[Array]) -> list[Array]:
    """Send each rank its part of the values; return all ranks' values of this rank's part, in rank order."""
    rank = transport.rank
    others = [(rank + i) % transport.size for i in range(1, transport.size)]
    sends = transport.send_all((wire.pack_all(parts[other], 0) for other in others), others, parts[rank])
    transport.traffic.rounds += 1
    arrived = {rank: parts[rank]}
    for other in reversed(others):
        (arrived[other],) = wire.unpack_values([transport.receive(other, parts[rank]).wait()])
    for sending in sends:
        sending.wait()
    return [arrived[other] for other in range(transport.size)]
