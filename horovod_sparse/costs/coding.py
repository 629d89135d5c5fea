"""Indices in few bits: what they cost on the wire, and when coding them is faster."""

from __future__ import annotations

import functools
import math

INDEX_BYTES = 4
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
