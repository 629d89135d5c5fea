"""Top-k with a reused threshold: the sparsifier of Ok-Topk (Li and Hoefler, PPoPP 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import integer, number
from horovod_sparse.rules.threshold import ReusedThreshold
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector

# Above this multiple of the band's upper end, a step selects exactly k entries. This bounds what Ok-Topk sends.
_CUT = 4 / 3


class ReusedTopK(Fused):
    """Selects exactly the k largest magnitudes periodically, and in between all that reach the last threshold.

    After a step above the band, the threshold is nudged up. Unlike in the paper, a step that would be below the band,
    or above 4/3 of its upper end, selects exactly the k largest: nudging does not keep up with magnitudes that change
    from batch to batch.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """Options of ReusedTopK.

        Attributes:
            tau_threshold: Steps between exact selections.
            local_low: Lower end of the band for the number of entries, as a fraction of k.
            local_high: Upper end of the band. The paper uses 5/4; 1 sends fewer bytes.
            local_scale: Factor on the threshold after a step above the band.
        """

        tau_threshold: int = integer(32, least=1)
        local_low: float = number(2 / 3, above=0, most=1)
        local_high: float = number(1.0, least=1)
        local_scale: float = number(1.012, least=1)

    replicated = False  # the threshold differs from rank to rank

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(context, options)
        low, high, scale = options.local_low, options.local_high, options.local_scale
        self._threshold = ReusedThreshold(options.tau_threshold, low, high, scale, scale, context.events)

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move about k entries out of the accumulator."""
        del step
        threshold = self._threshold
        if threshold.due(k):
            vector = accumulator.take_largest(k, self._threads)
        else:
            threshold.reuse()
            vector = accumulator.take_above(threshold.value, self._threads)
            if threshold.holds(len(vector), times=_CUT):
                return vector
            threshold.failed()
            vector = self._exactly(k, vector, accumulator)
        threshold.renew(float(np.abs(vector.values).min()) if len(vector) else 0.0, k)
        return vector

    def _exactly(self, k: int, vector: SparseVector, accumulator: Accumulator) -> SparseVector:
        """Return the k largest magnitudes, given all that reach some threshold."""
        if len(vector) > k:
            return accumulator.keep_largest(vector, k)
        return vector.plus(accumulator.take_largest(k - len(vector), self._threads))

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold and for how many steps it remains valid."""
        return self._threshold.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``."""
        self._threshold.load_state_dict(state)
