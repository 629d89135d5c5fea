"""GraVAC: as much compression as the gradients bear (Tyagi and Swany, "GraVAC", IEEE CLOUD 2023)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from horovod_sparse.schedules.moment import Moment


class GraVAC:
    """Weighs two compression factors in every step: the lowest in force, and a candidate that is ``cf_step`` as high.

    The gain of a factor is the share of the accumulated gradient's squared norm that it sends, averaged over the
    ranks. A step sends by the candidate if its gain is at least ``eps``, else by the lower factor if that one's is,
    else everything. When the candidate's mean gain over a window comes within ``omega`` of the lower factor's, that
    one rises to the candidate. The candidate goes through all factors up to ``cf_max``, one window each. Then the
    smallest one is settled on whose gain times throughput (steps per second) is within ``omega`` of the largest: more
    compression would not pay any more.

    Args:
        density: 1 / cf_min, where cf_min is the lowest compression factor.
        cf_max: The highest compression factor.
        cf_step: Factor from one candidate to the next.
        window: Steps for which a candidate is watched.
        eps: Least gain that a step may be sent with; 0.7 or 0.9 in the paper.
        omega: Relative difference that counts as none.

    Raises:
        ValueError: A number is out of range, or cf_min is above cf_max.
    """

    weighs = True

    def __init__(
        self,
        density: float,
        *,
        cf_max: float = 1000.0,
        cf_step: float = 2.0,
        window: int = 500,
        eps: float = 0.7,
        omega: float = 0.01,
    ) -> None:
        cf_min = 1 / density
        if cf_min > cf_max:
            raise ValueError(
                f"cf_min must not be above cf_max, but is {cf_min:g} (1 / density), and cf_max is {cf_max:g}: raise "
                "density or cf_max"
            )
        if cf_step <= 1:
            raise ValueError(f"cf_step must be above 1, not {cf_step}: candidates have to rise")
        if window < 1:
            raise ValueError(f"window must be at least 1 step, not {window}")
        if not 0 < eps <= 1 or not 0 <= omega < 1:
            raise ValueError(f"eps must be in (0, 1] and omega in [0, 1), not {eps} and {omega}")
        self._cf_max, self._cf_step = cf_max, cf_step
        self._window, self._eps, self._omega = window, eps, omega
        self._lowest = cf_min
        self._candidate = min(cf_min * cf_step, cf_max)
        self._settled = False
        self._gains = [0.0, 0.0]  # sums over the window so far
        self._steps = 0
        self._seen: list[list[float]] = []  # [factor, gain * throughput]
        self._started = time.perf_counter()  # the window

    def densities(self, moment: Moment) -> Sequence[float]:
        """What the lowest factor and the candidate send."""
        del moment
        return (1 / self._lowest, 1 / self._candidate)

    def choose(self, gains: Sequence[float], moment: Moment) -> int | None:
        """The candidate, the lowest factor or everything, by the gains; takes note of them."""
        chosen = next((index for index in (1, 0) if gains[index] >= self._eps), None)
        if not self._settled:
            self._gains = [total + gain for total, gain in zip(self._gains, gains, strict=True)]
            self._steps += 1
            if self._steps == self._window:
                self._end_window(moment)
        return chosen

    def _end_window(self, moment: Moment) -> None:
        (seconds,) = moment.mean([time.perf_counter() - self._started])
        lowest, candidate = (total / self._steps for total in self._gains)
        self._seen.append([self._candidate, candidate * self._steps / max(seconds, 1e-9)])
        if lowest - candidate <= self._omega * lowest:
            self._lowest = self._candidate
        if self._candidate < self._cf_max:
            self._candidate = min(self._candidate * self._cf_step, self._cf_max)
        else:
            self._settle()
        self._gains, self._steps, self._started = [0.0, 0.0], 0, time.perf_counter()

    def _settle(self) -> None:
        best = max(worth for _, worth in self._seen)
        self._candidate = min(factor for factor, worth in self._seen if worth >= (1 - self._omega) * best)
        self._lowest = min(self._lowest, self._candidate)
        self._settled = True

    def state_dict(self) -> dict[str, Any]:
        """The factors in force and what is known about those seen."""
        return {
            "lowest": self._lowest,
            "candidate": self._candidate,
            "settled": self._settled,
            "gains": list(self._gains),
            "steps": self._steps,
            "seconds": time.perf_counter() - self._started,
            "seen": [list(pair) for pair in self._seen],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        self._lowest, self._candidate = float(state["lowest"]), float(state["candidate"])
        self._settled, self._steps = bool(state["settled"]), int(state["steps"])
        self._gains = [float(gain) for gain in state["gains"]]
        self._seen = [[float(number) for number in pair] for pair in state["seen"]]
        self._started = time.perf_counter() - float(state["seconds"])
