"""Costs of coded indices: bytes on the wire, and the break-even with plain indices."""

from __future__ import annotations

import functools
import math

INDEX_BYTES = 4
_MOST_BITS = 24


@functools.lru_cache(maxsize=1024)
def coded_bytes(density: float) -> float:
    """Return the expected bytes of a coded index for random positions: a Rice code with the best number of low bits.

    Gaps are geometric. A gap takes ``bits`` low bits and, in unary, one bit plus one for each ``2**bits`` positions.

    Args:
        density: Fraction of positions that have an entry, above 0, at most 1.
    """
    log_free = math.log1p(-density) if density < 1 else -math.inf  # log of the probability that a position has no entry
    return min(bits - 1 / math.expm1(log_free * 2**bits) for bits in range(_MOST_BITS + 1)) / 8


def coding_pays(seconds_per_byte: float, seconds_per_entry: float, density: float) -> bool:
    """Return whether encoding and decoding indices takes less time than sending the bytes that it saves."""
    return seconds_per_byte * (INDEX_BYTES - coded_bytes(density)) > seconds_per_entry
