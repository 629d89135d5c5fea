"""Spreads entries evenly over the ranks that hold them in ascending order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from horovod_sparse.rules import SparseVector
from horovod_sparse.wire import Entries, Wire, concatenate

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport


def balance(transport: Transport, wire: Wire, vector: SparseVector, counts: Sequence[int]) -> SparseVector:
    """Gives every rank an equal share; all positions on a rank stay below those on the next.

    Args:
        transport: Of the ranks that take part.
        wire: Format of the messages, in which values travel as they are.
        vector: This rank's entries, whose positions are above those on lower ranks.
        counts: The number of entries of every rank.

    Returns:
        This rank's share.
    """
    entries = vector.entries
    rank, ranks = transport.rank, transport.size
    held, share = _bounds(counts)
    outgoing = [_common(held, rank, share, other) for other in range(ranks)]
    targets = [other for other, (begin, end) in enumerate(outgoing) if begin < end and other != rank]
    messages = (wire.pack(_part(entries, *(at - held[rank] for at in outgoing[other]))) for other in targets)
    sends = transport.send_all(messages, targets, entries[1])
    parts = [
        wire.unpack(transport.receive(other, entries[1]).wait(), vector.size)
        if other != rank
        else _part(entries, begin - held[rank], end - held[rank])
        for other, (begin, end) in enumerate(_common(held, other, share, rank) for other in range(ranks))
        if begin < end
    ]
    for one in sends:
        one.wait()
    return SparseVector(*concatenate([_part(entries, 0, 0), *parts]), vector.size)


def saving(counts: Sequence[int]) -> int:
    """Entries by which ``balance`` shortens the longest way of a gathering; negative where it lengthens it.

    Every rank's entries go round a ring in P-1 steps, each of which takes as long as the largest of them: (P-1) max.
    Balancing leaves (P-1) times the mean, after the rank that gives away or takes in most has done so.

    Args:
        counts: The number of entries of every rank.
    """
    ranks, (held, share) = len(counts), _bounds(counts)
    shares = np.diff(share)
    stay = [max(0, end - begin) for begin, end in (_common(held, rank, share, rank) for rank in range(ranks))]
    moved = np.maximum(counts, shares) - stay
    return int((ranks - 1) * (max(counts) - shares.max()) - moved.max())


def _bounds(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Positions among all at which every rank's entries begin, and the last one's end: now, and in equal shares."""
    held = np.cumsum([0, *counts]).tolist()
    return held, [rank * held[-1] // len(counts) for rank in range(len(counts) + 1)]


def _common(held: Sequence[int], holder: int, share: Sequence[int], owner: int) -> tuple[int, int]:
    """The range of entries that one rank holds and another shall have."""
    return max(held[holder], share[owner]), min(held[holder + 1], share[owner + 1])


def _part(entries: Entries, begin: int, end: int) -> Entries:
    return entries[0][begin:end], entries[1][begin:end]
