"""Time of a training step: what the backward pass does not hide of an exchange.

Units: seconds and bytes.
"""

from __future__ import annotations

import math

# The part of a step's computing time that the backward pass takes: about twice as long as the forward pass.
_BACKWARD = 2 / 3
# The limits are those of DistributedDataParallel: its first bucket has 1 MiB, the others have 25.
_LEAST_BYTES, _MOST_BYTES, _DENSE_BUCKETS = 1 << 20, 25 << 20, 8


def bucket_limit(nbytes: float, dense: bool) -> float:
    """Return the largest size of a bucket in bytes, by default.

    If everything is sent, buckets are small: the first one is then complete early in the backward pass, and the last
    one, whose exchange nothing hides, is short. If a fraction is sent, they are large: each takes rounds of messages.

    Args:
        nbytes: Bytes of all gradients.
        dense: Whether everything is sent.
    """
    return min(max(nbytes / _DENSE_BUCKETS, _LEAST_BYTES), _MOST_BYTES) if dense else _MOST_BYTES


def buckets(nbytes: float, dense: bool) -> int:
    """Return the number of buckets of a model.

    Args:
        nbytes: Bytes of all gradients.
        dense: Whether the preset always sends everything; it then has more buckets.
    """
    return math.ceil(nbytes / bucket_limit(nbytes, dense))


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
