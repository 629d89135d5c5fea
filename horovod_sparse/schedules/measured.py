"""Measured density: the largest that costs no time, found by trials during training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import flag, integer, is_number, number, text
from horovod_sparse.rules.states import checked_integer, checked_number, checked_numbers
from horovod_sparse.schedules.constant import Constant
from horovod_sparse.schedules.decisions import Candidate, Replay, write

_LOG = logging.getLogger("horovod_sparse")
_HOPELESS = 1.5  # a candidate that takes this many times the least time is not tried again
_CERTAIN = 3  # rounds in which a candidate must be too slow, or fast enough, for an early decision
_DRIFT = 1.2  # ratio of two step times that leads to new trials
_WINDOW = 50  # steps over which a step time is taken after the trials
_PROBE = 4  # windows until a larger candidate is tried once; doubled after each
_WIRES = ("log8", "float16")  # of everything, rounded
_CREDIT, _SHARE = 300, 0.01  # number of trial steps always allowed, and share of all steps besides
_MOST_STEPS = 512  # local steps that are proposed
_WAITING = 0.5  # share of the shortest step that, spent waiting, makes local steps worth a proposal


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
            least: Density to try besides if the smallest of these is the only one left: bytes are then what steps wait
                for. Without effect unless it is smaller than all of them.
            rounded: Also try everything rounded to 16 and to 8 bits, if densities include 1.
            max_exposed: Step time of the chosen density over the shortest one, minus 1, at most.
            trial: Number of steps of a trial.
            trial_steps: Number of steps of the trials together, unless one round of them needs more.
            record: File into which rank 0 writes the decisions, one JSON object per line; None: none.
            decisions: File of decisions to repeat, instead of trials; None: none.
        """

        densities: tuple[float, ...] = (1.0, 0.1, 0.03, 0.01, 0.002)
        least: float = number(1.0, lambda x: 0 < x <= 1, "in (0, 1]")
        rounded: bool = flag(True)
        max_exposed: float = number(0.05, lambda x: x >= 0, "at least 0")
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
        if _Trials not in context.shared:
            context.shared[_Trials] = _Trials(options)
        self._trials: _Trials = context.shared[_Trials]

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


class _Trials:
    """Trials of the candidates of a model, shared by all its buckets.

    Candidates are tried in rounds, first selections, from the smallest density up, then everything, last everything
    rounded; the spare one only if no other choice is left. A round's trials follow each other closely, so times are
    compared as ratios within a round.

    Args:
        options: Options of the schedule.
        clock: Returns the time in seconds.
    """

    def __init__(self, options: Measured.Options, clock: Callable[[], float] = time.perf_counter) -> None:
        self._options, self._clock = options, clock
        self._candidates = options.candidates
        self._replay = Replay(options.decisions, self._candidates) if options.decisions else None
        self._chosen = 0  # the decision
        self._current = self._order[0]  # candidate in use: a trial's or the decision
        self._alive = self._order  # candidates on trial, in the order of trials; empty: it has been decided
        self._times: list[list[float]] = [[] for _ in self._candidates]  # of steps, by round; equal on all ranks
        self._waits: list[list[float]] = [[] for _ in self._candidates]  # seconds of them that were exposed, likewise
        self._made = 0  # trials since they started
        self._proposed = False  # whether local steps have been proposed
        self._reference = 0.0  # step time after the last trials; 0: not known
        self._drifted = 0  # windows in a row with another step time
        self._windows, self._probe = 0, _PROBE  # windows since the last trial, and until the next probe
        self._steps, self._tried = 0, 0  # steps so far, and those of them that were trials
        self._history: list[list[int]] = []  # number of the step, and candidate used from there on
        self._periods: list[float] = []  # of this rank, in the trial or window in progress
        self._exposed: list[float] = []  # seconds of them that were exposed
        self._last, self._began = math.inf, math.nan  # number of the latest bucket, and begin of the step

    @property
    def _order(self) -> list[int]:
        dense = [index for index, one in enumerate(self._candidates) if one.density == 1]
        return [*range(int(self._options.spare), len(self._candidates) - len(dense)), *reversed(dense)]

    @property
    def _trying(self) -> bool:
        return bool(self._alive) or self._current != self._chosen

    def begin(self, context: BucketContext, exposed: float = 0.0) -> Candidate:
        """Return what a step sends; every bucket calls this once in a step, on all ranks. A collective call.

        Args:
            context: The bucket.
            exposed: Seconds of the previous step, as in ``Step``.
        """
        first, self._last = context.bucket <= self._last, context.bucket
        if first and self._replay is not None:
            self._current = self._replay.at(self._steps, context)
            self._steps += 1
        elif first:
            self._begin(context, exposed)
        return self._candidates[self._current]

    def _begin(self, context: BucketContext, exposed: float) -> None:
        now = self._clock()
        if math.isfinite(self._began):  # else it is the first step, or the first of a resumed run
            self._periods.append(now - self._began)
            self._exposed.append(exposed)
        self._began = now
        if len(self._periods) == (self._options.trial if self._trying else _WINDOW):
            # A trial's first step includes the change of the density. The median ignores evaluations.
            mine = [median(self._periods[1:]), median(self._exposed[1:])]
            self._periods, self._exposed = [], []
            seconds, waiting = context.mean(mine)
            if self._alive:
                self._note_trial(context, seconds, waiting)
            elif self._trying:
                self._note_probe(context, seconds)
            else:
                self._note_window(context, seconds)
        if not self._history or self._history[-1][1] != self._current:
            self._history.append([self._steps, self._current])
            if self._options.record and context.rank == 0:
                write(Path(self._options.record), [(at, self._candidates[index]) for at, index in self._history])
        self._steps += 1
        if self._trying:
            self._tried += 1
            context.events["trial_steps"] += 1

    def _note_trial(self, context: BucketContext, seconds: float, waiting: float) -> None:
        place, times = self._alive.index(self._current), self._times[self._current]
        times.append(seconds)
        self._made += 1
        self._waits[self._current].append(waiting)
        remaining = self._alive[place + 1 :]
        if len(times) == 1 and seconds > _HOPELESS * min(self._times[index][0] for index in self._alive[: place + 1]):
            if self._candidates[self._current].density < 1:
                remaining = []  # larger selections would take longer still, and everything even more so
            self._alive = [*self._alive[:place], *remaining]
        if remaining:
            self._current = remaining[0]
        else:
            self._end_round(context)

    def _end_round(self, context: BucketContext) -> None:
        ratios, limit = self._ratios(), 1 + self._options.max_exposed
        certain = len(self._times[self._alive[0]]) >= _CERTAIN
        if certain:
            self._alive = [index for index in self._alive if min(ratios[index]) <= limit]
            certain = len(self._alive) == 1 or max(ratios[max(self._alive)]) <= limit
        if self._options.spare and self._alive == [1] and not self._times[0]:
            self._times[1], self._waits[1] = [], []  # a new first round, of the two smallest
            self._alive, self._current = [0, 1], 0
            return
        steps = (self._made + len(self._alive)) * self._options.trial  # with another round
        if certain or steps > self._options.trial_steps:
            chosen = max(index for index in self._alive if median(ratios[index]) <= limit)
            self._decide(context, chosen, ratios[chosen])
        else:
            self._current = self._alive[0]

    def _ratios(self) -> dict[int, list[float]]:
        """Return the step times of each candidate relative to those of the fastest one, by round."""
        fastest = min(self._alive, key=lambda index: median(self._times[index]))
        return {
            index: [own / other for own, other in zip(self._times[index], self._times[fastest], strict=True)]
            for index in self._alive
        }

    def _decide(self, context: BucketContext, chosen: int, ratios: Sequence[float]) -> None:
        self._chosen = self._current = chosen
        self._alive, self._reference, self._drifted, self._windows = [], 0.0, 0, 0
        context.events["decisions"] += 1
        measured = {str(one): median(times) for one, times in zip(self._candidates, self._times, strict=True) if times}
        for name, seconds in measured.items():
            context.events[f"trial_seconds_{name}"] = seconds  # type: ignore[assignment]  # of the last trials
        if context.rank == 0:
            table = ", ".join(f"{name}: {1000 * seconds:.1f}" for name, seconds in measured.items())
            # Candidates that were dropped have no times of later rounds, so the medians do not show why.
            _LOG.info(
                "chose density %s, whose steps take %.2f times the shortest (median of %d rounds, limit %.2f); median "
                "step time in ms by density, each over its own rounds: %s",
                *(self._candidates[chosen], median(ratios), len(ratios), 1 + self._options.max_exposed, table),
            )
        self._note_waits(context)

    def _note_waits(self, context: BucketContext) -> None:
        """Count the exposed share of the shortest step, and propose local steps once if it is more than a half."""
        tried = [index for index, times in enumerate(self._times) if times]
        shortest = min(tried, key=lambda index: median(self._times[index]))
        seconds, waiting = median(self._times[shortest]), median(self._waits[shortest])
        share = waiting / seconds
        context.events["trial_exposed_share"] = share  # type: ignore[assignment]
        if context.rank or share <= _WAITING or self._proposed:
            return
        self._proposed = True
        # Nothing hides an exchange between local steps; it shall take no longer than they do.
        steps = 2 ** math.ceil(math.log2(seconds / max(seconds - waiting, seconds / _MOST_STEPS)))
        _LOG.warning(
            "even at density %s, where steps are shortest, ranks wait for %.0f %% of a step (%.1f of %.1f ms): "
            "exchange less often, by hvs.LocalOptimizer with local_steps=%d, or %d times those that you have "
            "(docs/local-steps.md)",
            *(self._candidates[shortest], 100 * share, 1000 * waiting, 1000 * seconds, steps, steps),
        )

    def _note_window(self, context: BucketContext, seconds: float) -> None:
        self._windows += 1
        # The links may have changed since the trials, before there is a more precise reference.
        reference = self._reference or median(self._times[self._chosen])
        drifts = not reference / _DRIFT < seconds < reference * _DRIFT
        if not (self._reference or drifts):
            self._reference = seconds
        self._drifted = self._drifted + 1 if drifts else 0
        if self._drifted >= 2 and self._affordable(self._options.trial_steps):  # one window may be an accident
            self._start(context, f"a step takes {1000 * seconds:.1f} ms instead of {1000 * reference:.1f}")
        elif not drifts and self._windows >= self._probe and self._affordable(self._options.trial):
            larger = range(self._chosen + 1, len(self._candidates))
            self._current = next(iter(larger), self._chosen)
            self._windows, self._probe = 0, 2 * self._probe

    def _affordable(self, steps: int) -> bool:
        return self._tried + steps <= _CREDIT + _SHARE * self._steps

    def _note_probe(self, context: BucketContext, seconds: float) -> None:
        probed, self._current = self._current, self._chosen
        if seconds <= (1 + self._options.max_exposed) * self._reference and self._affordable(self._options.trial_steps):
            self._start(context, f"a step at density {self._candidates[probed]} takes {1000 * seconds:.1f} ms")

    def _start(self, context: BucketContext, why: str) -> None:
        if context.rank == 0:
            _LOG.info("%s: trying the densities again", why)
        self._alive = self._order
        self._times, self._waits = [[] for _ in self._candidates], [[] for _ in self._candidates]
        self._current, self._probe, self._made = self._alive[0], _PROBE, 0

    def state_dict(self) -> dict[str, Any]:
        """Return decisions and measurements that all ranks share; a trial in progress is repeated."""
        return {
            "chosen": self._chosen,
            "current": self._current,
            "alive": list(self._alive),
            "times": [list(times) for times in self._times],
            "waits": [list(waits) for waits in self._waits],
            "made": self._made,
            "reference": self._reference,
            "drifted": self._drifted,
            "windows": self._windows,
            "probe": self._probe,
            "steps": self._steps,
            "tried": self._tried,
            "history": [list(entry) for entry in self._history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``; ValueError if a value is invalid."""
        count = len(self._candidates)
        used = [index for _, index in state["history"]]
        indices = [state["chosen"], state["current"], *state["alive"], *used]
        fits = all(checked_integer(index, "index of a density") < count for index in indices)
        if not fits or {len(state["times"]), len(state["waits"])} != {count}:
            raise ValueError(f"the state of measured densities does not fit {count} of them: {state!r:.200}")
        times = [checked_numbers(one, "times of measured", finite=True) for one in state["times"]]
        waits = [
            checked_numbers(one, "waits of measured", len(own), finite=True)
            for one, own in zip(state["waits"], times, strict=True)
        ]
        names = ("made", "drifted", "windows", "probe", "steps", "tried")
        numbers = [checked_integer(state[name], f"{name} of measured") for name in names]
        history = [[checked_integer(at, "step of a decision"), int(index)] for at, index in state["history"]]
        self._reference = checked_number(state["reference"], "reference of measured", finite=True)
        self._chosen, self._current, *_ = map(int, indices)
        self._alive, self._history = [int(one) for one in state["alive"]], history
        self._times, self._waits = times, waits
        self._made, self._drifted, self._windows, self._probe, self._steps, self._tried = numbers
        self._periods, self._exposed, self._last, self._began = [], [], math.inf, math.nan
