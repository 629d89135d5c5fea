"""A top-k threshold that is computed exactly at intervals and reused in between.

From Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022); serves local and global
thresholds.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from horovod_sparse.rules.states import checked_integer, checked_number


class ReusedThreshold:
    """A top-k threshold that is recomputed at intervals, and adjusted when too many or too few entries reach it.

    The band is the accepted number of entries that reach the threshold.

    Args:
        period: Steps from one exact threshold to the next.
        low: Lower end of the band, as a fraction of k.
        high: Upper end of the band, as a fraction of k.
        up: Factor on the threshold when the count is above the band.
        down: Divisor of the threshold when the count is below the band.
        events: Counter for ``thresholds_reused`` and ``thresholds_renewed``; None: a private one.
    """

    def __init__(
        self, period: int, low: float, high: float, up: float, down: float, events: Counter[str] | None = None
    ) -> None:
        self._period, self._low, self._high, self._up, self._down = period, low, high, up, down
        self.value = 0.0
        self._events: Counter[str] = Counter() if events is None else events
        self._k = 0
        self._left = 0  # steps for which the value may still be reused
        self._exact = 0  # steps that must still recompute the value after a failure
        self._distrust = 1  # number of such steps after the next failure

    def due(self, k: int) -> bool:
        """Return whether the threshold for k entries must be recomputed, as it must after an overflow (NaN)."""
        return self._left == 0 or k != self._k or math.isnan(self.value)

    def renew(self, value: float, k: int) -> None:
        """Set an exact threshold, such as the k-th largest magnitude."""
        self._events["thresholds_renewed"] += 1
        self._exact = max(0, self._exact - 1)
        self.value, self._k, self._left = value, k, 0 if self._exact else self._period - 1

    def reuse(self) -> None:
        """Count a step that starts with the previous threshold."""
        self._left -= 1

    def holds(self, count: int, times: float = 1) -> bool:
        """Return whether the threshold is good enough to be used; adjust it if ``count`` is outside the band.

        Args:
            count: Number of entries that reach the threshold.
            times: Factor on the upper end of the band, for the result only, not for the adjustment.
        """
        below, most = count < self._low * self._k, self._high * self._k
        if count > most:
            self.value *= self._up
        elif below:
            self.value /= self._down
        if below or count > most * times:
            return False
        self._events["thresholds_reused"] += 1
        self._distrust = 1
        return True

    def failed(self) -> None:
        """Record that the threshold did not hold, so that the next steps recompute it as well.

        The number of these steps starts at 1 and doubles with each failure, up to the period, until a threshold holds.
        While magnitudes change quickly, as in early training, trying the last threshold costs more than it saves.
        """
        self._exact, self._distrust = self._distrust + 1, min(2 * self._distrust, self._period)

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold and how long it may be reused."""
        return {
            "value": self.value,
            "k": self._k,
            "left": self._left,
            "exact": self._exact,
            "distrust": self._distrust,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
        self.value = checked_number(state["value"], "value of the threshold")
        keys = ("k", "left", "exact")
        self._k, self._left, self._exact = (checked_integer(state[key], f"{key} of the threshold") for key in keys)
        self._distrust = checked_integer(state["distrust"], "distrust of the threshold", least=1)
