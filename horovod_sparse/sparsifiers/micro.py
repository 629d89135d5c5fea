"""MiCRO: each rank selects in another part of the bucket, with one threshold (Yoon and Oh, HiPC 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.states import checked_integer, checked_number
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector

# Factors on the threshold after a step whose total has more than 1.1 k entries, about k, or fewer than 0.909 k.
_MORE, _FEWER = 1.1, 0.909
_RAISE, _CREEP, _LOWER = 1.005, 1.00125, 0.995
# Outside this range of multiples of k, the factors would take hundreds of steps: the threshold is computed again.
_FAR = (0.5, 2.0)


class MiCRO(Fused):
    """Selects the magnitudes of one part of the bucket that reach a threshold, about k on all ranks together.

    There is a part for each rank; in step t, rank r selects in part (t + r) mod P. The threshold is the same on every
    rank. It is raised or lowered slightly after each step, depending on the number of entries of the total. Made for
    the collective ``union``, which sums all ranks' values at the selected positions.

    The first threshold, and one after a total that was far from k, is the mean of the ranks' exact ones: in that step,
    each rank selects k/P entries. The authors start with 1 / (2 sqrt(k)), regardless of the scale of the gradients, and
    never correct it otherwise.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """The common options of rules with fused kernels."""

    def __init__(self, context: BucketContext, options: Any) -> None:
        super().__init__(context, options)
        self._threshold = 0.0  # 0: to be computed in the next step
        self._k = 0  # that the threshold is for

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move about k/P entries out of the accumulator."""
        ranks = self._context.ranks
        number = (step.number + self._context.rank) % ranks
        boundaries = self._boundaries()
        part = accumulator.part(boundaries[number], boundaries[number + 1])
        if self._threshold and k == self._k:
            return part.take_above(self._threshold, self._threads)
        vector = part.take_largest((number + 1) * k // ranks - number * k // ranks, self._threads)
        self._threshold, self._k = self._agreed(vector), k
        self._context.events["thresholds_renewed"] += 1
        return vector

    def _boundaries(self) -> list[int]:
        """Return where the parts begin, and the end of the last one."""
        return [part * self._context.size // self._context.ranks for part in range(self._context.ranks + 1)]

    def _agreed(self, vector: SparseVector) -> float:
        """Return the mean of the ranks' smallest magnitudes, where there are any; 0 if it cannot serve as threshold."""
        smallest = [float(np.abs(vector.values).min()), 1.0] if len(vector) else [0.0, 0.0]
        total, count = self._context.consensus(np.array(smallest)).tolist()
        threshold = total / max(count, 1.0)
        return threshold if 0 < threshold < math.inf else 0.0

    def observe(self, total: SparseVector) -> None:
        """Adjust the threshold to the number of entries of the total."""
        if total.indices is None:
            return
        ratio = len(total) / max(self._k, 1)
        if not _FAR[0] <= ratio <= _FAR[1]:
            self._threshold = 0.0
        self._threshold *= _RAISE if ratio > _MORE else _CREEP if ratio > _FEWER else _LOWER

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold, and the k that it is for."""
        return {"threshold": self._threshold, "k": self._k}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``."""
        self._threshold = checked_number(state["threshold"], "threshold of micro")
        self._k = checked_integer(state["k"], "k of micro")
