"""Allgather in log2 P rounds of messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from horovod_sparse.kernels.types import Array

Trade: TypeAlias = Callable[[Array, int, Array, int], object]
"""Sends an array to a rank, receives one from another, and waits for both."""

# Up to this many ranks, every rank sends its part to every other at once: that takes one round. On more ranks, P - 1
# messages take longer than log2 P rounds.
DIRECT_RANKS = 16


def gather_by_doubling(parts: Sequence[Array], rank: int, trade: Trade) -> None:
    """Gather every rank's part in ceil(log2 P) messages, which hold P - 1 parts in total.

    In each round, a rank's parts double (Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
    Message-Passing Systems", 1997). A later round forwards what an earlier one has brought, so that a rank makes no
    progress while another computes or waits for something else. Gatherings that are begun and waited for later are
    therefore not made this way.

    Args:
        parts: Arrays on the host, in rank order, of the same sizes on all ranks; each rank has filled its own.
        rank: Number of this rank.
        trade: Function that exchanges the messages of a round.
    """
    size, held = len(parts), 1
    contents = [part.view(np.uint8) for part in parts]
    while held < size:
        count = min(held, size - held)
        mine = [contents[(rank + i) % size] for i in range(count)]
        theirs = [contents[(rank + held + i) % size] for i in range(count)]
        received = np.empty(sum(part.size for part in theirs), np.uint8)
        trade(np.concatenate(mine), (rank - held) % size, received, (rank + held) % size)
        cuts = itertools.accumulate([part.size for part in theirs], initial=0)
        for part, (start, end) in zip(theirs, itertools.pairwise(cuts), strict=True):
            part[:] = received[start:end]
        held += count
