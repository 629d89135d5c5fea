"""GraVAC: as much compression as the gradients bear (Tyagi and Swany, "GraVAC", IEEE CLOUD 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import integer, number, one_of
from horovod_sparse.rules.states import checked_integer, checked_number, checked_numbers
from horovod_sparse.rules.tally import Tally, Told
from horovod_sparse.schedules.constant import Constant

_KEPT = 101  # the last steps by which the throughput of a factor is known


class GraVAC(Constant):
    """Weighs two compression factors in every step: the lowest in force, and a candidate that is ``cf_step`` as high.

    The gain of a factor is the squared norm of what it sends, or would, over that of the gradients, both of the whole
    model and in a moving average over the steps before. One decision goes for all buckets: the candidate's entries, if
    its gain is at least ``eps``, else the lower factor's, if that one's is, else everything.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Constant.Options):
        """Options of GraVAC; the density configured is 1 / cf_min, where cf_min is the lowest compression factor.

        Attributes:
            cf_max: The highest compression factor.
            cf_step: Factor from one candidate to the next.
            window: Steps for which a candidate is watched, and the span of the averages.
            eps: Least gain that a step may be sent with; 0.7 or 0.9 in the paper.
            omega: Relative difference that counts as none.
            gain: What a gain is a share of: "gradient", as published, or "accumulated", residual and gradient together.
        """

        cf_max: float = number(1000.0, lambda x: x >= 1, "at least 1")
        cf_step: float = number(2.0, lambda x: x > 1, "above 1", hint="candidates have to rise")
        window: int = integer(500, least=1)
        eps: float = number(0.7, lambda x: 0 < x <= 1, "in (0, 1]")
        omega: float = number(0.01, lambda x: 0 <= x < 1, "in [0, 1)")
        gain: str = one_of("gradient", "gradient", "accumulated")

    weighs = True

    def __init__(self, context: BucketContext, density: float, options: Options) -> None:
        super().__init__(context, density, options)
        cf_min = 1 / density
        if cf_min > options.cf_max:
            raise ValueError(
                f"cf_min must not be above cf_max, but is {cf_min:g} (1 / density), and cf_max is "
                f"{options.cf_max:g}: raise density or cf_max"
            )
        self._search: _Search = context.shared.setdefault(_Search, _Search(cf_min, options))
        self._idle, self._scale, self._gradient = False, 1.0, 0.0  # of the step in progress

    def _densities(self, step: Step) -> Sequence[float]:
        """Shares that the lowest factor and the candidate send."""
        self._search.begin(self._context)
        self._idle, self._scale = step.idle, step.loss_scale**2
        if self._options.gain == "gradient":
            self._gradient = step.square_norm()
        return (1 / self._search.lowest, 1 / self._search.candidate)

    def choose(self, squares: Sequence[float], rest: Callable[[], float]) -> tuple[int | None, Sequence[float]]:
        """The model's choice in this step; notes the squares for the next one."""
        parts = [square / self._scale for square in squares]
        whole = self._gradient if self._options.gain == "gradient" else parts[0] + rest() / self._scale
        self._search.tally.add([whole, *parts], self._idle)
        return self._search.chosen, self._search.gains

    def state_dict(self) -> dict[str, Any]:
        """The state of the model's search; the same in every bucket between two steps."""
        return self._search.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        self._search.load_state_dict(state)


class _Search:
    """The factors in force and what is known about them, for all buckets of a model together.

    The first window sends the lowest factor. In each later one, a candidate is watched, and its average begins anew. If
    its gain at the end is within ``omega`` of the lowest factor's, that one rises to it. When all candidates up to
    ``cf_max`` were seen, the smallest factor is settled on whose compression throughput, gain over seconds a step, is
    within ``omega`` of the best: more compression would not pay any more. Only steps that were sent by a factor count
    for it.

    Args:
        cf_min: The lowest factor.
        options: Of the schedule.

    Attributes:
        lowest: The lowest factor in force.
        candidate: The other one.
        chosen: 0: the lowest factor is sent in this step; 1: the candidate; None: everything.
        tally: Squared norms of the gradients and of both factors' entries.
    """

    def __init__(self, cf_min: float, options: GraVAC.Options) -> None:
        self._options = options
        self.lowest = cf_min
        self.candidate = min(cf_min * options.cf_step, options.cf_max)
        self.chosen: int | None = 0
        self.tally = Tally(3)
        self._stage = 0  # 0: the first window; 1: candidates are watched; 2: settled
        self._steps = 0  # of the window
        self._averages = [[0.0, 0.0], [0.0, 0.0]]  # for either factor: of its entries, of the whole
        self._seen: list[list[Any]] = []  # [factor, gain over seconds of each of the last steps that it was sent in]

    @property
    def gains(self) -> list[float]:
        """Gains of both factors; where one is not known, 1 or that of the lower factor, so that it is tried."""
        (part, whole), (narrower, other) = self._averages
        lowest = part / whole if whole > 0 else 1.0
        return [lowest, narrower / other if other > 0 else lowest]

    def begin(self, context: BucketContext) -> None:
        """Learns from the step before and decides on this one, once for all buckets; a collective call."""
        told = self.tally.begin(context)
        if told is None:
            return
        self._learn(told)
        if self._steps == self._options.window:
            self._end_window()
        reaching = [index for index in (1, 0) if self.gains[index] >= self._options.eps]
        self.chosen = 0 if self._stage == 0 else next(iter(reaching), None)

    def _learn(self, told: Told) -> None:
        # The mean of the last steps of a window, with weights that fall exponentially over that span.
        fresh = 2 / (self._options.window + 1)
        whole, *parts = told.sums
        self._averages = [
            [(1 - fresh) * old + fresh * new for old, new in zip(pair, (part, whole), strict=True)]
            for pair, part in zip(self._averages, parts, strict=True)
        ]
        if self._stage == 2:
            return
        self._steps += 1
        if self.chosen is not None and told.seconds > 0:  # not NaN
            factor, throughput = (self.lowest, self.candidate)[self.chosen], self.gains[self.chosen] / told.seconds
            kept: list[float] = next((kept for other, kept in self._seen if other == factor), [])
            others = [one for one in self._seen if one[0] != factor]
            self._seen = [*others, [factor, [*kept, throughput][-_KEPT:]]]

    def _end_window(self) -> None:
        self._steps = 0
        if self._stage == 0:
            self._stage = 1
            return
        lowest, candidate = self.gains
        if abs(lowest - candidate) <= self._options.omega * lowest:
            self.lowest, self._averages = self.candidate, [self._averages[1]] * 2
        if self.candidate < self._options.cf_max:
            self.candidate = min(self.candidate * self._options.cf_step, self._options.cf_max)
            self._averages = [self._averages[0], [0.0, 0.0]]
        else:
            self._settle()
            self._stage = 2

    def _settle(self) -> None:
        # The median leaves out steps that something else came after, such as a validation.
        worth = {factor: median(kept) for factor, kept in self._seen}
        best = max(worth.values(), default=0.0)
        paying = [factor for factor, one in worth.items() if one >= (1 - self._options.omega) * best]
        self.candidate = min(paying, default=self.lowest)
        lowest, unknown = self._averages[0], [0.0, 0.0]
        self._averages = [lowest if self.lowest <= self.candidate else unknown, unknown]
        self.lowest = min(self.lowest, self.candidate)

    def state_dict(self) -> dict[str, Any]:
        """The factors in force and what is known about those seen."""
        return {
            "lowest": self.lowest,
            "candidate": self.candidate,
            "chosen": self.chosen,
            "stage": self._stage,
            "steps": self._steps,
            "averages": self._averages,  # a new list in every step
            "seen": self._seen,
            "tally": self.tally.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``; ValueError if a value is impossible."""
        self.lowest, self.candidate = (
            checked_number(state[key], f"{key} of gravac", 1, finite=True) for key in ("lowest", "candidate")
        )
        if state["chosen"] not in (None, 0, 1) or state["stage"] not in (0, 1, 2) or len(state["averages"]) != 2:
            raise ValueError(
                "gravac needs chosen=None, 0 or 1, stage=0, 1 or 2 and two averages, not "
                f"{state['chosen']!r:.100}, {state['stage']!r:.100} and {state['averages']!r:.100}"
            )
        self.chosen, self._stage = state["chosen"], state["stage"]
        self._steps = checked_integer(state["steps"], "steps of gravac")
        self._averages = [checked_numbers(pair, "averages of gravac", 2, finite=True) for pair in state["averages"]]
        self._seen = [
            [checked_number(factor, "seen of gravac", 1, finite=True), checked_numbers(kept, "seen of gravac")]
            for factor, kept in state["seen"]
        ]
        self.tally.load_state_dict(state["tally"])
