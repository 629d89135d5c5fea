"""Spread ascending entries evenly over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from horovod_sparse.rules import SparseVector
from horovod_sparse.wire import Entries, Wire, concatenate

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport


def balance(transport: Transport, wire: Wire, vector: SparseVector, counts: Sequence[int]) -> SparseVector:
    """Return this rank's equal share of the entries; all positions on a rank stay below those on the next rank.

    Args:
        transport: Transport of the participating ranks.
        wire: Message format that does not round values.
        vector: Entries of this rank; their positions are above those on lower ranks.
        counts: Number of entries on every rank.
    """
    entries = vector.entries
    rank, ranks = transport.rank, transport.size
    held, share = _bounds(counts)
    outgoing = [_common(held, rank, share, other) for other in range(ranks)]
    targets = [other for other, (begin, end) in enumerate(outgoing) if begin < end and other != rank]
    messages = (wire.pack(_part(entries, *(at - held[rank] for at in outgoing[other]))) for other in targets)
    sends = transport.send_all(messages, targets, entries[1])
    transport.traffic.rounds += 1
    parts = [
        wire.unpack(transport.receive(other, entries[1]).wait(), vector.size)
        if other != rank
        else _part(entries, begin - held[rank], end - held[rank])
        for other, (begin, end) in enumerate(_common(held, other, share, rank) for other in range(ranks))
        if begin < end
    ]
    for sending in sends:
        sending.wait()
    return SparseVector(*concatenate([_part(entries, 0, 0), *parts]), vector.size)


def saving(counts: Sequence[int]) -> int:
    """Return by how many entries ``balance`` shortens the critical path of an allgather; negative if it lengthens it.

    A ring allgather takes P-1 steps, each as long as its largest message: (P-1) max(counts) entries in total, with the
    ranks' numbers of entries ``counts``. After balancing it is (P-1) times the mean. Balancing itself costs the most
    entries that any rank gives away or receives.
    """
    ranks, (held, share) = len(counts), _bounds(counts)
    shares = np.diff(share)
    stay = [max(0, end - begin) for begin, end in (_common(held, rank, share, rank) for rank in range(ranks))]
    moved = np.maximum(counts, shares) - stay
    return int((ranks - 1) * (max(counts) - shares.max()) - moved.max())


def _bounds(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return where each rank's entries begin among all entries, and the end: as held now, and in equal shares."""
    held = np.cumsum([0, *counts]).tolist()
    return held, [rank * held[-1] // len(counts) for rank in range(len(counts) + 1)]


def _common(held: Sequence[int], holder: int, share: Sequence[int], owner: int) -> tuple[int, int]:
    """Return the range of entries that ``holder`` holds now and that belong to the share of ``owner``."""
    return max(held[holder], share[owner]), min(held[holder + 1], share[owner + 1])


def _part(entries: Entries, begin: int, end: int) -> Entries:
    return entries[0][begin:end], entries[1][begin:end]
