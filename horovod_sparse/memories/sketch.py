"""Count sketch: an unbiased, linear error compressor (Charikar, Chen and Farach-Colton 2002)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.kernels import kernels_for, to_device
from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.memories.base import require_fit, total
from horovod_sparse.rules import BucketContext


class CountSketch:
    """Error compressor that adds every value to hashed counters with a pseudo-random sign, and estimates it from them.

    The hash is the same for encoding and decoding, in every step and on every rank, so that sketches can be added. With
    w counters in one row, E ||decode(encode(x)) - x||^2 <= (n/w) ||x||^2.

    Args:
        context: The bucket and the rank.
        saving: Fraction of a residual's memory that is saved, in (0, 1).
        rows: Number of hash functions: 1, 3 or 5. An estimate is the median over the rows, and each row has its part of
            the counters. More rows suit a few large values among many small ones, one row suits values of similar size.
        seed: Seed of the hash.
        part: Number of this error compressor within its bucket; part of the seed.

    Raises:
        ValueError: The bucket is too small for a sketch to save anything.
    """

    carries = True  # ``update`` adds only the changes to the held vector

    def __init__(self, context: BucketContext, saving: float, rows: int, seed: int, part: int) -> None:
        self._kernels = kernels_for(context.like)
        length = self._kernels.sketch_length(context.size, 1 - saving, rows)
        if length > context.size:
            raise ValueError(
                f"rank {context.rank}: a sketch of {length} counters is larger than the residual of bucket "
                f"{context.bucket} with its {context.size} elements: raise dense_below, so that small parameters are "
                "sent dense, or use fewer rows"
            )
        self._rows = rows
        self._seed = int(np.random.SeedSequence([seed, context.bucket, part]).generate_state(1, np.uint64)[0] >> 1)
        self._counters: Array = np.zeros(length, context.like.dtype, like=context.like)

    def rescale(self, factor: float) -> None:
        """Multiply the held vector by a factor; 0 clears it."""
        if factor == 0:
            self._counters.fill(0)
        elif factor != 1:
            self._counters *= self._counters.dtype.type(factor)

    def decode(self, buffer: Array, factor: float, *, add: bool = False) -> None:
        """Set the buffer to factor * the held vector, or add that to it."""
        self._kernels.sketch_query(self._counters, buffer, self._rows, self._seed, factor, add=add)

    def update(self, buffer: Array, delivered: Indices, carried: float, step: int) -> None:
        """Replace the held vector by the buffer plus (1 - carried) * the held vector.

        Values that were decoded and are still in the buffer stay in their counters: encoding them again would multiply
        every counter by the number of positions that share it. A delivered position gives up its share of its counter,
        the best estimate of what it held. A counter never gives up more than it holds.

        Args:
            buffer: Shape (n,), which started as ``carried`` times the held vector. Left unchanged if ``carried`` is 1.
            delivered: Positions delivered since then, int32, ascending; there the buffer holds what was returned.
            carried: Share of the held vector that is in the buffer, in [0, 1].
            step: Number of the step; seeds its random numbers, if there are any.
        """
        del step
        self._kernels.sketch_update(self._counters, buffer, delivered, self._rows, self._seed, carried)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, not copied."""
        return {"counters": self._counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy the counters into place; ValueError if their number or dtype differs."""
        require_fit(state["counters"], self._counters)
        self._counters[...] = to_device(state["counters"], self._counters)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Add up the counters, as the hash is the same on every rank."""
        return {"counters": total([state["counters"] for state in states], self._counters)}
