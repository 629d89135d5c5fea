"""Factor by which gradients were multiplied after their exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch

from horovod_sparse.engine.delivered import Delivered
from horovod_sparse.frontends.shards import shard_of

Buckets: TypeAlias = dict[int, dict[torch.Tensor, Delivered]]  # by number


def by_bucket(selected: Mapping[torch.Tensor, Delivered]) -> Buckets:
    """Return parameters by the numbers of their buckets."""
    buckets: Buckets = {}
    for p, delivered in selected.items():
        buckets.setdefault(delivered.number, {})[p] = delivered
    return buckets


def factor_of(bucket: Mapping[torch.Tensor, Delivered], unit: float) -> float | None:
    """Return what an entry of a bucket was multiplied by after the exchange, in a unit of the sum that was delivered.

    None if that is not known.
    """

    def gradient_of(key: str) -> torch.Tensor | None:
        gradient = next((p.grad for p, delivered in bucket.items() if delivered.key == key), None)
        return None if gradient is None or gradient.is_sparse else shard_of(gradient)

    ratio = next(iter(bucket.values())).ratio(gradient_of)
    return ratio / unit if ratio is not None and unit and 0 < ratio / unit < math.inf else None
