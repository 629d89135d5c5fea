"""GraVAC: adapts the compression to the gradients (Tyagi and Swany, "GraVAC", IEEE CLOUD 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import integer, number, one_of
from horovod_sparse.rules.states import checked_integer, checked_number, checked_numbers
from horovod_sparse.rules.tally import StepSums, Tally
from horovod_sparse.schedules.constant import Constant

_KEPT = 101  # number of recent steps that determine the throughput of a factor


class GraVAC(Constant):
    """Compares two compression factors in every step: the current lowest one, and a higher candidate.

    The gain of a factor is the squared norm of the entries that it sends, or would send, divided by that of the
    gradients. Both norms are of the complete model, and moving averages over the previous steps. One decision holds for
    all buckets: send the candidate's entries if its gain is at least ``eps``, otherwise the entries of the lowest
    factor if its gain is, otherwise everything.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Constant.Options):
        """Options of GraVAC. The configured density is 1 / cf_min, where cf_min is the lowest compression factor.

        Attributes:
            cf_max: Highest compression factor.
            cf_step: Ratio of successive candidates.
            window: Number of steps for which a candidate is evaluated, and span of the moving averages.
            eps: Least gain of a factor whose entries are sent; 0.7 or 0.9 in the paper.
            omega: Relative difference up to which two gains, or two throughputs, count as equal.
            gain: Denominator of the gain: "gradient", as published, or "accumulated", which is residual plus gradient.
        """

        cf_max: float = number(1000.0, least=1)
        cf_step: float = number(2.0, above=1, hint="candidates must increase")
        window: int = integer(500, least=1)
        eps: float = number(0.7, above=0, most=1)
        omega: float = number(0.01, least=0, below=1)
        gain: str = one_of("gradient", "gradient", "accumulated")

    weighs = True
    predictable = False

    def __init__(self, context: BucketContext, density: float, options: Options) -> None:
        super().__init__(context, density, options)
        cf_min = 1 / density
        if cf_min > options.cf_max:
            raise ValueError(
                f"cf_min must not be above cf_max, but is {cf_min:g} (1 / density), and cf_max is "
                f"{options.cf_max:g}: raise density or cf_max"
            )
        self._search: _Search = context.shared.setdefault(_Search, _Search(cf_min, options))
        self._idle, self._scale, self._gradient = False, 1.0, 0.0  # of the current step

    def _densities(self, step: Step) -> Sequence[float]:
        """Return the densities of the lowest factor and of the candidate."""
        self._search.begin(self._context)
        self._idle, self._scale = step.idle, step.loss_scale**2
        if self._options.gain == "gradient":
            self._gradient = step.square_norm()
        return (1 / self._search.lowest, 1 / self._search.candidate)

    def choose(self, squares: Sequence[float], rest: Callable[[], float]) -> tuple[int | None, Sequence[float]]:
        """Return the model's choice in this step, and record the squares for the next step."""
        parts = [square / self._scale for square in squares]
        whole = self._gradient if self._options.gain == "gradient" else parts[0] + rest() / self._scale
        self._search.tally.add([whole, *parts], self._idle)
        return self._search.chosen, self._search.gains

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model's search; the same in every bucket between two steps."""
        return self._search.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``."""
        self._search.load_state_dict(state)


class _Search:
    """Search for the compression factor, shared by all buckets of a model.

    The first window sends the entries of the lowest factor. Each later window evaluates one candidate with new
    averages. If its gain at the end is within ``omega`` of the lowest factor's, the lowest factor rises to the
    candidate. After all candidates up to ``cf_max``, the search settles on the smallest factor whose compression
    throughput (gain / seconds per step) is within ``omega`` of the best: more compression would not pay off. The
    throughput of a factor is measured only in steps that sent its entries.

    Attributes:
        lowest: Current lowest factor.
        candidate: Current candidate.
        chosen: What this step sends: entries of the lowest factor (0), of the candidate (1), or everything (None).
        tally: Denominator of the gains, and squared norms of both factors' entries.
    """

    def __init__(self, cf_min: float, options: GraVAC.Options) -> None:
        self._options = options
        self.lowest = cf_min
        self.candidate = min(cf_min * options.cf_step, options.cf_max)
        self.chosen: int | None = 0
        self.tally = Tally(3)
        self._stage = 0  # 0: first window; 1: evaluating candidates; 2: settled
        self._steps = 0  # in the current window
        self._averages = [[0.0, 0.0], [0.0, 0.0]]  # per factor: numerator and denominator of its gain
        self._seen: dict[float, list[float]] = {}  # by factor: throughputs of the last steps that sent its entries

    @property
    def gains(self) -> list[float]:
        """Gains of both factors; an unknown gain is 1 or that of the lowest factor, so that the factor is tried."""
        (part, whole), (candidate_part, candidate_whole) = self._averages
        lowest = part / whole if whole > 0 else 1.0
        return [lowest, candidate_part / candidate_whole if candidate_whole > 0 else lowest]

    def begin(self, context: BucketContext) -> None:
        """Evaluate the previous step and decide on this one, once for all buckets. A collective operation."""
        previous = self.tally.begin(context)
        if previous is None:
            return
        self._learn(previous)
        if self._steps == self._options.window:
            self._end_window()
        reaching = [index for index in (1, 0) if self.gains[index] >= self._options.eps]
        self.chosen = 0 if self._stage == 0 else next(iter(reaching), None)

    def _learn(self, previous: StepSums) -> None:
        # Exponential moving averages with the span of a window.
        fresh = 2 / (self._options.window + 1)
        whole, *parts = previous.sums
        self._averages = [
            [(1 - fresh) * old + fresh * new for old, new in zip(pair, (part, whole), strict=True)]
            for pair, part in zip(self._averages, parts, strict=True)
        ]
        if self._stage == 2:
            return
        self._steps += 1
        if self.chosen is not None and previous.seconds > 0:  # false for NaN
            factor, throughput = (self.lowest, self.candidate)[self.chosen], self.gains[self.chosen] / previous.seconds
            self._seen[factor] = [*self._seen.get(factor, ()), throughput][-_KEPT:]

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
        # The median ignores steps that took longer because of other work, such as a validation.
        worth = {factor: median(kept) for factor, kept in self._seen.items()}
        best = max(worth.values(), default=0.0)
        paying = [factor for factor, throughput in worth.items() if throughput >= (1 - self._options.omega) * best]
        self.candidate = min(paying, default=self.lowest)
        lowest, unknown = self._averages[0], [0.0, 0.0]
        self._averages = [lowest if self.lowest <= self.candidate else unknown, unknown]
        self.lowest = min(self.lowest, self.candidate)

    def state_dict(self) -> dict[str, Any]:
        """Return the current factors and the measurements of all factors so far."""
        return {
            "lowest": self.lowest,
            "candidate": self.candidate,
            "chosen": self.chosen,
            "stage": self._stage,
            "steps": self._steps,
            "averages": self._averages,  # a new list in every step
            "seen": [[factor, kept] for factor, kept in self._seen.items()],
            "tally": self.tally.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``; ValueError if a value is invalid."""
        self.lowest, self.candidate = (
            checked_number(state[key], f"{key} of gravac", 1, finite=True) for key in ("lowest", "candidate")
        )
        if state["chosen"] not in (None, 0, 1) or state["stage"] not in (0, 1, 2) or len(state["averages"]) != 2:
            raise ValueError(
                "gravac needs chosen=None, 0 or 1, stage=0, 1 or 2, and two averages, not "
                f"{state['chosen']!r:.100}, {state['stage']!r:.100}, and {state['averages']!r:.100}"
            )
        self.chosen, self._stage = state["chosen"], state["stage"]
        self._steps = checked_integer(state["steps"], "steps of gravac")
        self._averages = [checked_numbers(pair, "averages of gravac", 2, finite=True) for pair in state["averages"]]
        self._seen = {
            checked_number(factor, "seen of gravac", 1, finite=True): checked_numbers(kept, "seen of gravac")
            for factor, kept in state["seen"]
        }
        self.tally.load_state_dict(state["tally"])
