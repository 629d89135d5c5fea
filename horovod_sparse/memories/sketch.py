"""Count sketch: an unbiased error compressor that is linear (Charikar, Chen and Farach-Colton 2002)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.kernels import kernels_for, to_device
from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.memories.base import require_fit, total
from horovod_sparse.rules import BucketContext


class CountSketch:
    """Counters to which every position is added with a pseudo-random sign; the position's value is read off them.

    The hash is the same in both directions, in every step and on every rank, so that sketches can be added up. With w
    counters in one row, E ||decode(encode(x)) - x||^2 <= (n/w) ||x||^2.

    Args:
        context: The bucket and the rank.
        saving: Share of a residual's memory that is saved, in (0, 1).
        rows: Hashes of each position, 1, 3 or 5, whose median is read. Each row has its part of the counters: more
            rows suit a few large values among many small ones, one row suits values of about one size.
        seed: Of the hash.
        part: Tells sketches of one bucket apart.

    Raises:
        ValueError: The bucket is too small for a sketch to save anything.
    """

    carries = True

    def __init__(self, context: BucketContext, saving: float, rows: int, seed: int, part: int) -> None:
        self._kernels = kernels_for(context.like)
        length = self._kernels.sketch_length(context.size, 1 - saving, rows)
        if length > context.size:
            raise ValueError(
                f"rank {context.rank}: a sketch of {length} counters is larger than the residual of bucket "
                f"{context.bucket} with its {context.size} elements: raise dense_below, so that small parameters make "
                "no bucket of their own, or use fewer rows"
            )
        self._rows = rows
        self._seed = int(np.random.SeedSequence([seed, context.bucket, part]).generate_state(1, np.uint64)[0] >> 1)
        self._counters: Array = np.zeros(length, context.like.dtype, like=context.like)

    def rescale(self, factor: float) -> None:
        """Multiplies what is held; 0 forgets it."""
        if factor == 0:
            self._counters.fill(0)
        elif factor != 1:
            self._counters *= self._counters.dtype.type(factor)

    def decode(self, buffer: Array, factor: float) -> None:
        """Sets the buffer to factor * what is held."""
        self._kernels.sketch_query(self._counters, buffer, self._rows, self._seed, factor)

    def add_to(self, buffer: Array, factor: float) -> None:
        """Adds factor * what is held to the buffer."""
        self._kernels.sketch_query(self._counters, buffer, self._rows, self._seed, factor, add=True)

    def update(self, buffer: Array, delivered: Indices, carried: float, step: int) -> None:
        """Holds the buffer, and the part 1 - carried of what was held.

        What was read off the counters and is still in the buffer stays where it is: a second encoding would multiply
        every counter by the number of positions that share it. Where a position was delivered, its share of the counter
        is given up, the best estimate of what it was: no more is ever given up than is there.
        """
        del step  # nothing is random
        self._kernels.sketch_update(self._counters, buffer, delivered, self._rows, self._seed, carried)

    def state_dict(self) -> dict[str, Any]:
        """The counters themselves, not a copy."""
        return {"counters": self._counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies the counters in; ValueError when there are more or fewer, or of another dtype."""
        require_fit(state["counters"], self._counters)
        self._counters[...] = to_device(state["counters"], self._counters)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Counters add up: the hash is the same on every rank."""
        return {"counters": total([state["counters"] for state in states], self._counters)}
