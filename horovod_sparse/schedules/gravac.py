"""GraVAC: as much compression as the gradients bear (Tyagi and Swany, "GraVAC", IEEE CLOUD 2023)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.rules import Place, Step
from horovod_sparse.rules.options import number, whole
from horovod_sparse.schedules.constant import Constant


class GraVAC(Constant):
    """Weighs two compression factors in every step: the lowest in force, and a candidate that is ``cf_step`` as high.

    The gain of a factor is the share of the accumulated gradient's squared norm that it sends, averaged over the
    ranks. A step sends by the candidate if its gain is at least ``eps``, else by the lower factor if that one's is,
    else everything. When the candidate's mean gain over a window comes within ``omega`` of the lower factor's, that
    one rises to the candidate. The candidate goes through all factors up to ``cf_max``, one window each. Then the
    smallest one is settled on whose gain times throughput (steps per second) is within ``omega`` of the largest: more
    compression would not pay any more.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Constant.Options):
        """Options of GraVAC; the density configured is 1 / cf_min, where cf_min is the lowest compression factor.

        Attributes:
            cf_max: The highest compression factor.
            cf_step: Factor from one candidate to the next.
            window: Steps for which a candidate is watched.
            eps: Least gain that a step may be sent with; 0.7 or 0.9 in the paper.
            omega: Relative difference that counts as none.
        """

        cf_max: float = number(1000.0, lambda x: x >= 1, "at least 1")
        cf_step: float = number(2.0, lambda x: x > 1, "above 1", hint="candidates have to rise")
        window: int = whole(500, least=1)
        eps: float = number(0.7, lambda x: 0 < x <= 1, "in (0, 1]")
        omega: float = number(0.01, lambda x: 0 <= x < 1, "in [0, 1)")

    weighs = True

    def __init__(self, place: Place, density: float, options: Options) -> None:
        super().__init__(place, density, options)
        cf_min = 1 / density
        if cf_min > options.cf_max:
            raise ValueError(
                f"cf_min must not be above cf_max, but is {cf_min:g} (1 / density), and cf_max is "
                f"{options.cf_max:g}: raise density or cf_max"
            )
        self._lowest = cf_min
        self._candidate = min(cf_min * options.cf_step, options.cf_max)
        self._settled = False
        self._gains = [0.0, 0.0]  # sums over the window so far
        self._steps = 0
        self._seen: list[list[float]] = []  # [factor, gain * throughput]
        self._started = time.perf_counter()  # the window

    def _densities(self, step: Step) -> Sequence[float]:
        """Shares that the lowest factor and the candidate send."""
        del step
        return (1 / self._lowest, 1 / self._candidate)

    def choose(self, gains: Sequence[float]) -> int | None:
        """The candidate, the lowest factor or everything, by the gains; takes note of them."""
        chosen = next((index for index in (1, 0) if gains[index] >= self._options.eps), None)
        if not self._settled:
            self._gains = [total + gain for total, gain in zip(self._gains, gains, strict=True)]
            self._steps += 1
            if self._steps == self._options.window:
                self._end_window()
        return chosen

    def _end_window(self) -> None:
        (seconds,) = self._place.mean([time.perf_counter() - self._started])
        lowest, candidate = (total / self._steps for total in self._gains)
        self._seen.append([self._candidate, candidate * self._steps / max(seconds, 1e-9)])
        if lowest - candidate <= self._options.omega * lowest:
            self._lowest = self._candidate
        if self._candidate < self._options.cf_max:
            self._candidate = min(self._candidate * self._options.cf_step, self._options.cf_max)
        else:
            self._settle()
        self._gains, self._steps, self._started = [0.0, 0.0], 0, time.perf_counter()

    def _settle(self) -> None:
        best = max(worth for _, worth in self._seen)
        self._candidate = min(factor for factor, worth in self._seen if worth >= (1 - self._options.omega) * best)
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
