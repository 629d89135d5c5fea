"""Per-step numbers of a model, summed over its buckets and averaged over the ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.states import checked_flag, checked_numbers


class StepSums(NamedTuple):
    """Sums and duration of a completed step, equal on every rank.

    Attributes:
        sums: Sums over all buckets, averaged over the ranks that had a backward pass.
        seconds: Time from the start of the step to the start of the next, averaged over the ranks; NaN: unknown.
    """

    sums: list[float]
    seconds: float


class Tally:
    """Sums of ``count`` numbers over the buckets of one model, available when the next step begins.

    During backward, the buckets of a model are exchanged one by one in the order of their numbers, each at most once in
    a step. The sums of a step are therefore incomplete until it ends. The first bucket of the next step reduces them
    over the ranks in one short message.
    """

    def __init__(self, count: int) -> None:
        self._sums = [0.0] * count
        self._added = self._works = False  # in the current step: any bucket added; this rank had a backward pass
        self._last = math.inf  # the latest bucket of the current step
        self._began = math.nan

    def begin(self, context: BucketContext) -> StepSums | None:
        """Return the previous step's sums to the first bucket of a step; None to the others, or if there are none.

        Every bucket calls this once in a step, on all ranks; a collective call.
        """
        first, self._last = context.bucket <= self._last, context.bucket
        if not first:
            return None
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        return self._exchange(context, seconds) if self._added else None

    def _exchange(self, context: BucketContext, seconds: float) -> StepSums | None:
        *sums, working, mean = context.mean([*self._sums, self._works, seconds])
        self._sums = [0.0] * len(self._sums)
        self._added = self._works = False
        if not working or not np.isfinite(sums).all():  # squares may overflow where the numbers did not
            return None
        return StepSums([total / working for total in sums], mean)

    def add(self, numbers: Sequence[float], idle: bool) -> None:
        """Add a bucket's local numbers, shape (count,); those of an idle rank, without backward pass, are ignored."""
        self._added = True
        if not idle:
            self._works = True
            self._sums = [total + number for total, number in zip(self._sums, numbers, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the local sums that were not reduced yet; times are not saved."""
        return {"sums": list(self._sums), "added": self._added, "works": self._works}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned; the next bucket begins a step."""
        self._sums = checked_numbers(state["sums"], "sums of the tally", len(self._sums))
        self._added = checked_flag(state["added"], "added of the tally")
        self._works = checked_flag(state["works"], "works of the tally")
        self._last, self._began = math.inf, math.nan
