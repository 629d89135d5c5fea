"""A magnitude that about k entries reach: found exactly now and then, reused in between.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022), for local and global
thresholds alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from horovod_sparse.rules.states import checked_integer, checked_number

_Range: TypeAlias = tuple[Callable[[float], bool], str]

# Ranges of the options, for ``options.number``: the band's ends and the factors that nudge.
LOW: _Range = (lambda x: 0 < x <= 1, "in (0, 1]")
UP: _Range = (lambda x: x >= 1, "at least 1")


class ReusedThreshold:
    """Says when a threshold has to be found anew, and nudges it when too many or too few entries reach it.

    Args:
        period: Steps from one exact threshold to the next.
        low: Lower end of the band, as a fraction of k.
        high: Its upper end.
        up: Factor on the threshold after more entries than the band allows.
        down: Divisor of the threshold after fewer.
        events: Counts ``thresholds_reused`` and ``thresholds_renewed``.
    """

    def __init__(
        self, period: int, low: float, high: float, up: float, down: float, events: Counter[str] | None = None
    ) -> None:
        self._period, self._low, self._high, self._up, self._down = period, low, high, up, down
        self.value = 0.0
        self._events: Counter[str] = Counter() if events is None else events
        self._k = 0
        self._left = 0  # steps for which the value may still be reused
        self._exact = 0  # steps that must still find it anew, because it did not hold
        self._distrust = 1  # how many such steps it costs, the next time that it does not hold

    def due(self, k: int) -> bool:
        """Tells whether a threshold for k entries has to be found anew; also where the last one came of an overflow."""
        return self._left == 0 or k != self._k or math.isnan(self.value)

    def renew(self, value: float, k: int) -> None:
        """Takes over an exact threshold, as the k-th largest magnitude is one."""
        self._events["thresholds_renewed"] += 1
        self._exact = max(0, self._exact - 1)
        self.value, self._k, self._left = value, k, 0 if self._exact else self._period - 1

    def reuse(self) -> None:
        """Counts a step that begins with the same threshold."""
        self._left -= 1

    def holds(self, count: int, times: float = 1) -> bool:
        """Tells whether the band, its upper end ``times`` as high, allows ``count`` entries; outside of it, nudges."""
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
        """The threshold did not hold and is found anew: in the next step too, and each time in twice as many.

        While magnitudes change a lot, as in the first steps of a training, to try the last threshold costs more than
        it saves.
        """
        self._exact, self._distrust = self._distrust + 1, min(2 * self._distrust, self._period)

    def state_dict(self) -> dict[str, Any]:
        """The threshold and how long it is good for."""
        return {
            "value": self.value,
            "k": self._k,
            "left": self._left,
            "exact": self._exact,
            "distrust": self._distrust,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        self.value = checked_number(state["value"], "value of the threshold")
        self._k = checked_integer(state["k"], "k of the threshold")
        self._left = checked_integer(state["left"], "left of the threshold")
        self._exact = checked_integer(state["exact"], "exact of the threshold")
        self._distrust = checked_integer(state["distrust"], "distrust of the threshold", least=1)
