"""Measured density: the largest that costs no time, found by trials during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import flag, integer, is_number, number, text
from horovod_sparse.schedules.constant import Constant
from horovod_sparse.schedules.decisions import Candidate
from horovod_sparse.schedules.trials import Trials

_WIRES = ("log8", "float16")  # of everything, rounded


class Measured(Constant):
    """Tries several densities in turn, and uses the largest whose steps take hardly longer than the shortest.

    Entire steps are timed, so bytes that travel during the backward pass cost nothing. All buckets of a
    model have the same density. If the step time changes later, because of other jobs on the network for example, the
    densities are tried again.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Constant.Options):
        """Options of the trials.

        Attributes:
            densities: Densities to try, in any order; 1 sends everything. They replace the configured density.
            least: Density that is tried once only the smallest of these is left, because steps wait for the bytes of
                the others. Without effect unless it is smaller than all of them.
            rounded: Also try everything rounded to 16 and to 8 bits, if densities include 1.
            max_exposed: Step time of the chosen density over the shortest one, minus 1, at most.
            trial: Number of steps of a trial.
            trial_steps: Number of steps of the trials together, unless one round of them needs more.
            record: File into which rank 0 writes the decisions, one JSON object per line; None: none.
            decisions: File of decisions to repeat, instead of trials; None: none.
        """

        densities: tuple[float, ...] = (1.0, 0.1, 0.03, 0.01, 0.002)
        least: float = number(1.0, above=0, most=1)
        rounded: bool = flag(True)
        max_exposed: float = number(0.05, least=0)
        trial: int = integer(4, least=2, hint="the first step of a trial is not counted")
        trial_steps: int = integer(100, least=1)
        record: str | None = text(None, free=True)
        decisions: str | None = text(None)

        def __post_init__(self) -> None:
            """Check the fields and the densities."""
            super().__post_init__()
            given: Any = self.densities
            if not isinstance(given, (list, tuple)) or not given or not all(is_number(x) and 0 < x <= 1 for x in given):
                raise ValueError(f"densities must be numbers in (0, 1], as in (1,0.1,0.01), not {given!r}")
            object.__setattr__(self, "densities", tuple(sorted(set(given))))

        @property
        def spare(self) -> bool:
            """True if ``least`` is the first candidate."""
            return self.least < self.densities[0]

        @property
        def candidates(self) -> list[Candidate]:
            """Candidates, by the accuracy expected of them, ascending."""
            selections = [Candidate(density) for density in self.densities if density < 1]
            if self.spare:
                selections.insert(0, Candidate(self.least))
            if 1 not in self.densities:
                return selections
            return [*selections, *(Candidate(1.0, wire) for wire in _WIRES if self.rounded), Candidate(1.0)]

    def __init__(self, context: BucketContext, density: float, options: Options) -> None:
        super().__init__(context, density, options)
        if Trials not in context.shared:
            context.shared[Trials] = Trials(options)
        self._trials: Trials = context.shared[Trials]

    def _densities(self, step: Step) -> Sequence[float]:
        self.wire_of_all = None
        if step.number < self._options.dense_steps:
            return (1.0,)  # the trials start after these steps
        density, self.wire_of_all = self._trials.begin(self._context, step.exposed)
        return (density,)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model's trials; the same in every bucket between two steps."""
        return self._trials.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``."""
        self._trials.load_state_dict(state)
