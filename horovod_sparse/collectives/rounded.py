"""Sum of arrays that are rounded for the wire: each rank sums one part in full precision, and rounds the sums."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from horovod_sparse.kernels import add_to, copied, joined
from horovod_sparse.kernels.scratch import SCRATCH
from horovod_sparse.kernels.types import Array
from horovod_sparse.wire import Wire

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport


def sum_rounded(transport: Transport, wire: Wire, values: Array) -> tuple[Array, slice, Array | None]:
    """Sum arrays over the ranks, 2 n (P-1)/P words of the wire format.

    Where several nodes have several ranks each, the ranks of a node sum up first. Then one rank of each node sums its
    part across the nodes; it rounds the part twice. The total reaches the ranks of a node in full precision.

    Args:
        transport: Transport of the participating ranks.
        wire: Wire that holds this rank's values exactly.
        values: Array of this rank [n], already rounded; the same length on every rank.

    Returns:
        The rounded sums, bitwise identical on every rank; the part of the array whose sums this rank has rounded; the
        rounding errors of this part, None if nothing was rounded.
    """
    nodes = transport.nodes_for_sums()
    group = transport if nodes is None else nodes.own
    block = wire.format.block
    blocks = -(-values.size // block)
    cuts = [min(rank * blocks // group.size * block, values.size) for rank in range(group.size + 1)]
    parts = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
    mine = parts[group.rank]
    sums = sum_parts(group, wire, [values[part] for part in parts])
    rounded, error, wire = wire.round(sums)
    if nodes is not None:
        rounded, part, error_across = sum_rounded(nodes.peers, wire, rounded)
        wire = wire.exact
        if error is not None:
            add_to(error[part], error_across)
    lengths = [wire.nbytes_all(count) for count in np.diff(cuts).tolist()]
    messages = group.allgather(wire.pack_all(rounded, mine.start), lengths)
    total = joined(wire.unpack_values(messages), out=SCRATCH.empty(values.size, values))
    return total, mine, error


def sum_parts(transport: Transport, wire: Wire, parts: Sequence[Array]) -> Array:
    """Send part r to rank r; return the sum of all ranks' parts for this rank, added in rank order.

    Args:
        transport: Transport of the participating ranks.
        wire: Wire that holds the values exactly.
        parts: One array for each rank; that for rank r has the same length on every rank.
    """
    first, *others = _swap(transport, wire, parts)
    return functools.reduce(add_to, others, copied(first))


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
