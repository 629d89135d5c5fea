"""Indices in few bits: what they cost on the wire, and when coding them is faster."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from horovod_sparse.costs.measure import measure_coding, measure_link
from horovod_sparse.kernels.types import MAX_SIZE, Array

if TYPE_CHECKING:
    from horovod_sparse.mpi.messenger import Messenger

INDEX_BYTES = 4
# A message with fewer entries is not worth the calls that code it.
_FEW = 512
_MOST_BITS = 24


@functools.lru_cache(maxsize=1024)
def coded_bytes(density: float) -> float:
    """Expected bytes of a coded index, of positions at random: a Rice code with the best number of low bits.

    Gaps are geometric; a gap takes ``bits`` low bits and, in unary, one bit and one for each ``2**bits`` positions.

    Args:
        density: Fraction of the positions, above 0, at most 1.
    """
    log_free = math.log1p(-density) if density < 1 else -math.inf  # of the probability that a position is free
    return min(bits - 1 / math.expm1(log_free * 2**bits) for bits in range(_MOST_BITS + 1)) / 8


def coding_pays(seconds_per_byte: float, seconds_per_entry: float, density: float) -> bool:
    """Tells whether the bytes that coding saves take longer than coding.

    Args:
        seconds_per_byte: Of the link.
        seconds_per_entry: For coding an index and decoding it.
        density: Fraction of the positions.
    """
    return seconds_per_byte * (INDEX_BYTES - coded_bytes(density)) > seconds_per_entry


def coded_from(messenger: Messenger, like: Array, density: float) -> int:
    """From how many entries on a message's indices should be coded, as measured; the same on every rank.

    Args:
        messenger: Of the ranks; all of them call this at the same point. The link and the coder are measured once for
            each communicator.
        like: Array on whose device the messages are.
        density: Fraction of the positions.
    """
    if messenger.ranks == 1 or density == 0:
        return MAX_SIZE + 1
    beta, code = measure_link(messenger, like).beta, measure_coding(messenger, like)
    return _FEW if coding_pays(beta, code, density) else MAX_SIZE + 1
