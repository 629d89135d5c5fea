"""Time of a training step: what the backward pass does not hide of an exchange.

Units: seconds and bytes.
"""

from __future__ import annotations

import math

# The part of a step's computing time that the backward pass takes: about twice as long as the forward pass.
_BACKWARD = 2 / 3
# Sizes of buckets by default (engine/layout.py): the largest and, where all is sent, the smallest and the number.
_MOST_BYTES, _LEAST_BYTES, _DENSE_BUCKETS = 25 << 20, 1 << 20, 8


def buckets(nbytes: float, dense: bool) -> int:
    """Return the number of buckets of a model.

    Args:
        nbytes: Bytes of all gradients.
        dense: Whether the preset always sends everything; it then has more buckets.
    """
    limit = min(max(nbytes / _DENSE_BUCKETS, _LEAST_BYTES), _MOST_BYTES) if dense else _MOST_BYTES
    return math.ceil(nbytes / limit)


def exposed(exchange: float, computing: float, buckets: int) -> float:
    """Return the time of an exchange that the backward pass does not hide.

    Buckets of equal size become ready at equal intervals during the backward pass, the last one at its end, and are
    exchanged one after the other. Other work does not slow the exchange down.

    Args:
        exchange: Time of the exchange of all buckets.
        computing: Time of forward and backward pass and optimizer.
        buckets: Number of buckets.
    """
    return max(exchange / buckets, exchange - _BACKWARD * computing * (1 - 1 / buckets))
