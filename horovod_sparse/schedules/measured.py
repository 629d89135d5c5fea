"""Measured density: the largest that costs no time, found by trials during training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import integer, is_number, number
from horovod_sparse.rules.states import checked_integer, checked_number, checked_numbers
from horovod_sparse.schedules.constant import Constant

_LOG = logging.getLogger("horovod_sparse")
_HOPELESS = 1.5  # a density that takes this many times the least time is not tried again, and no larger one is
_DRIFT = 1.3  # ratio of two step times that leads to new trials
_WINDOW = 50  # steps over which a step time is taken after the trials
_PATIENCE = 200  # steps until new trials may begin; doubled after each of them


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
            max_exposed: Step time of the chosen density over the shortest one, minus 1, at most.
            rounds: Number of trials of each density.
            trial: Number of steps of a trial.
        """

        densities: tuple[float, ...] = (1.0, 0.1, 0.03, 0.01, 0.002)
        max_exposed: float = number(0.05, lambda x: x >= 0, "at least 0")
        rounds: int = integer(5, least=1)
        trial: int = integer(4, least=2, hint="the first step of a trial is not counted")

        def __post_init__(self) -> None:
            """Check the fields and the densities."""
            super().__post_init__()
            given: Any = self.densities
            if not isinstance(given, (list, tuple)) or not given or not all(is_number(x) and 0 < x <= 1 for x in given):
                raise ValueError(f"densities must be numbers in (0, 1], as in (1,0.1,0.01), not {given!r}")
            object.__setattr__(self, "densities", tuple(sorted(set(given))))

    def __init__(self, context: BucketContext, density: float, options: Options) -> None:
        super().__init__(context, density, options)
        self._trials: _Trials = context.shared.setdefault(_Trials, _Trials(options))

    def _densities(self, step: Step) -> Sequence[float]:
        if step.number < self._options.dense_steps:
            return (1.0,)  # the trials start after these steps
        return (self._trials.begin(self._context),)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model's trials; the same in every bucket between two steps."""
        return self._trials.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``."""
        self._trials.load_state_dict(state)


class _Trials:
    """Trials of the densities of a model, shared by all its buckets.

    Args:
        options: Options of the schedule.
        clock: Returns the time in seconds.
    """

    def __init__(self, options: Measured.Options, clock: Any = time.perf_counter) -> None:
        self._options, self._clock = options, clock
        self._chosen = 0  # density in use, and on trial while there is one
        self._alive = list(range(len(options.densities)))  # densities on trial, ascending; empty: it has been decided
        self._times: list[list[float]] = [[] for _ in self._alive]  # of steps, by density and round; equal on all ranks
        self._reference = 0.0  # step time after the last trials; 0: not known
        self._drifted = 0  # windows in a row with another step time
        self._since, self._patience = 0, _PATIENCE  # steps since the last trials, and until the next ones
        self._periods: list[float] = []  # of this rank, in the trial or window in progress
        self._last, self._began = math.inf, math.nan  # number of the latest bucket, and begin of the step

    def begin(self, context: BucketContext) -> float:
        """Return the density of a step; every bucket calls this once in a step, on all ranks. A collective call."""
        first, self._last = context.bucket <= self._last, context.bucket
        if first:
            now = self._clock()
            if math.isfinite(self._began):  # else it is the first step, or the first of a resumed run
                self._periods.append(now - self._began)
            self._began = now
            if len(self._periods) == (self._options.trial if self._alive else _WINDOW):
                # A trial's first step includes the change of the density. The median ignores evaluations.
                mine = median(self._periods[1:])
                self._periods = []
                (self._note_trial if self._alive else self._note_window)(context, context.mean([mine])[0])
        return self._options.densities[self._chosen]

    def _note_trial(self, context: BucketContext, seconds: float) -> None:
        first_round = not self._times[self._chosen]
        self._times[self._chosen].append(seconds)
        least = min(median(times) for times in self._times if times)
        place = self._alive.index(self._chosen)
        if first_round and seconds > _HOPELESS * least:
            self._alive = self._alive[: max(place, 1)]  # larger densities would take even longer
            place = len(self._alive) - 1
        if place + 1 < len(self._alive):
            self._chosen = self._alive[place + 1]
        elif len(self._times[self._alive[0]]) < self._options.rounds and len(self._alive) > 1:
            self._chosen = self._alive[0]
        else:
            self._decide(context)

    def _decide(self, context: BucketContext) -> None:
        times = {index: median(self._times[index]) for index in self._alive}
        limit = (1 + self._options.max_exposed) * min(times.values())
        self._chosen = max(index for index in self._alive if times[index] <= limit)
        self._alive, self._reference, self._drifted, self._since = [], 0.0, 0, 0
        context.events["decisions"] += 1
        tried = {f"{self._options.densities[index]:g}": median(all_) for index, all_ in enumerate(self._times) if all_}
        density = self._options.densities[self._chosen]
        if context.rank == 0:
            table = ", ".join(f"{name}: {1000 * seconds:.1f}" for name, seconds in tried.items())
            _LOG.info("chose density %g; step time in ms by density: %s", density, table)

    def _note_window(self, context: BucketContext, seconds: float) -> None:
        self._since += _WINDOW
        if not self._reference:
            self._reference = seconds
            return
        drifts = not self._reference / _DRIFT < seconds < self._reference * _DRIFT
        self._drifted = self._drifted + 1 if drifts else 0
        if self._drifted < 2 or self._since < self._patience:  # one window may be an accident
            return
        if context.rank == 0:
            now, before = 1000 * seconds, 1000 * self._reference
            _LOG.info("a step takes %.1f ms instead of %.1f: trying the densities again", now, before)
        self._patience *= 2
        self._alive = list(range(len(self._options.densities)))
        self._times = [[] for _ in self._alive]
        self._chosen = 0

    def state_dict(self) -> dict[str, Any]:
        """Return decisions and measurements that all ranks share; a trial in progress is repeated."""
        return {
            "chosen": self._chosen,
            "alive": list(self._alive),
            "times": [list(times) for times in self._times],
            "reference": self._reference,
            "drifted": self._drifted,
            "since": self._since,
            "patience": self._patience,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``; ValueError if a value is invalid."""
        count = len(self._options.densities)
        indices = [state["chosen"], *state["alive"]]
        fits = all(checked_integer(index, "index of a density") < count for index in indices)
        if not fits or len(state["times"]) != count:
            raise ValueError(f"the state of measured densities does not fit {count} of them: {state!r:.200}")
        times = [checked_numbers(one, "times of measured", finite=True) for one in state["times"]]
        numbers = [checked_integer(state[name], f"{name} of measured") for name in ("drifted", "since", "patience")]
        self._reference = checked_number(state["reference"], "reference of measured", finite=True)
        self._chosen, self._alive, self._times = int(state["chosen"]), [int(one) for one in state["alive"]], times
        self._drifted, self._since, self._patience = numbers
        self._periods, self._last, self._began = [], math.inf, math.nan
