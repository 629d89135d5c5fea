"""Numbers about a step of a whole model: summed over its buckets and averaged over the ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.states import checked_flag, checked_numbers


class Told(NamedTuple):
    """A step that is over, the same on every rank.

    Attributes:
        sums: What the buckets added, summed over them, in the mean over the ranks that had a backward pass.
        seconds: From its beginning to that of the next one, in the mean over the ranks; NaN: not known.
    """

    sums: list[float]
    seconds: float


class Tally:
    """Adds up what the buckets of one model have to say in a step; it is known when the next step begins.

    A model's buckets are exchanged one after the other while backward goes on, in the order of their numbers, and at
    most once in a step: of a step in progress nobody knows the whole. So the first bucket of a step sums over the ranks
    what all buckets have added in the one before, in one short message.

    Args:
        count: How many numbers a bucket adds.
    """

    def __init__(self, count: int) -> None:
        self._sums = [0.0] * count
        self._added = self._works = False  # in the step in progress
        self._last = math.inf  # the bucket that came last in it
        self._began = math.nan

    def begin(self, context: BucketContext) -> Told | None:
        """Tells, to the first bucket of a step, about the step before, unless nobody had anything to say in it.

        To be called by every bucket, once in a step; a collective call.
        """
        first, self._last = context.bucket <= self._last, context.bucket
        if not first:
            return None
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        return self._exchange(context, seconds) if self._added else None

    def _exchange(self, context: BucketContext, seconds: float) -> Told | None:
        *sums, working, mean = context.mean([*self._sums, self._works, seconds])
        self._sums = [0.0] * len(self._sums)
        self._added = self._works = False
        if not working or not np.isfinite(sums).all():  # squares may overflow where the numbers did not
            return None
        return Told([one / working for one in sums], mean)

    def add(self, numbers: Sequence[float], idle: bool) -> None:
        """Adds a bucket's numbers.

        Args:
            numbers: This rank's.
            idle: This rank had no backward pass: its numbers do not count.
        """
        self._added = True
        if not idle:
            self._works = True
            self._sums = [one + more for one, more in zip(self._sums, numbers, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Numbers of this rank that the others were not told so far; times do not outlast a program."""
        return {"sums": list(self._sums), "added": self._added, "works": self._works}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``; the next bucket begins a step."""
        self._sums = checked_numbers(state["sums"], "sums of the tally", len(self._sums))
        self._added = checked_flag(state["added"], "added of the tally")
        self._works = checked_flag(state["works"], "works of the tally")
        self._last, self._began = math.inf, math.nan
