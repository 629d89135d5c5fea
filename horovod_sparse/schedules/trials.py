"""Trials of densities during a training: tried in turn, settled on, and probed again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.states import checked_integer, checked_number, checked_numbers
from horovod_sparse.schedules.decisions import Candidate, Replay, write

_LOG = logging.getLogger("horovod_sparse")
_HOPELESS = 1.5  # a candidate that takes this many times the least time is not tried again
_CERTAIN = 3  # rounds in which a candidate must be too slow, or fast enough, for an early decision
_DRIFT = 1.2  # ratio of two step times that leads to new trials
_WINDOW = 50  # steps over which a step time is taken after the trials
_PROBE = 4  # windows until a larger candidate is tried once; doubled after each
_CREDIT, _SHARE = 300, 0.01  # number of trial steps always allowed, and share of all steps besides
_MOST_STEPS = 512  # local steps that are proposed
_WAITING = 0.5  # share of the shortest step that, spent waiting, makes another setting worth a proposal
# Smallest density whose accuracy was measured: better than local steps at equal bytes (docs/local-steps.md).
_LEAST = 0.001
_SHORTER = 0.8  # ratio of two waits, at two densities, that shows that bytes take the time, and not messages


class _State(Enum):
    TRIAL = "trial"  # the candidates are tried in turn
    SETTLED = "settled"  # the chosen one is used, and watched
    PROBE = "probe"  # a larger one is tried once


@dataclass(slots=True)
class _Rounds:
    """Measurements of the candidates, in rounds: of the trials in progress, or of the last ones.

    Attributes:
        alive: Candidates on trial, in the order of trials.
        times: Seconds of a step by candidate and round; equal on all ranks.
        waits: Seconds of it that were exposed, likewise.
        made: Number of measurements.
    """

    alive: list[int]
    times: list[list[float]]
    waits: list[list[float]]
    made: int = 0

    def ratios(self) -> dict[int, list[float]]:
        """Return the step times of each candidate relative to those of the fastest one, by round."""
        fastest = min(self.alive, key=lambda index: median(self.times[index]))
        return {
            index: [own / other for own, other in zip(self.times[index], self.times[fastest], strict=True)]
            for index in self.alive
        }


@dataclass(slots=True)
class _Decision:
    """The candidate in use after trials.

    Attributes:
        chosen: The candidate.
        reference: Seconds of a step after the trials; 0: not known.
        drifted: Windows in a row with another step time.
        windows: Windows since the last trial or probe.
        patience: Windows until the next probe; doubled after each.
    """

    chosen: int = 0
    reference: float = 0.0
    drifted: int = 0
    windows: int = 0
    patience: int = _PROBE


class _Timer:
    """Times of this rank's steps in the measurement in progress.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget the measurement and the step in progress."""
        self._periods: list[float] = []
        self._exposed: list[float] = []
        self._began = math.nan

    def lap(self, exposed: float, count: int) -> list[float] | None:
        """Begin a step; return the median time of ``count`` steps, and of their exposed seconds, once they are there.

        A trial's first step includes the change of the density, and is left out. The median ignores evaluations.
        """
        now = self._clock()
        if math.isfinite(self._began):  # else it is the first step, or the first of a resumed run
            self._periods.append(now - self._began)
            self._exposed.append(exposed)
        self._began = now
        if len(self._periods) != count:
            return None
        medians = [median(self._periods[1:]), median(self._exposed[1:])]
        self._periods, self._exposed = [], []
        return medians


class Trials:
    """Trials of the candidates of a model, shared by all its buckets.

    Each round tries every candidate once: selections by ascending density, then everything, then everything rounded.
    The spare candidate (option ``least``) joins when only the smallest of the others is left. Times are compared within
    a round only, as its trials follow each other closely.

    Args:
        options: Options of the schedule.
        clock: Returns the time in seconds.
    """

    def __init__(self, options: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._options, self._timer = options, _Timer(clock)
        self._candidates: list[Candidate] = options.candidates
        self._replay = Replay(options.decisions, self._candidates) if options.decisions else None
        self._decision = _Decision()
        self._start()
        self._proposed = False  # whether local steps have been proposed
        self._steps, self._tried = 0, 0  # steps so far, and those of them that were trials
        self._history: list[list[int]] = []  # number of the step, and candidate used from there on
        self._last = math.inf  # number of the latest bucket

    def _start(self) -> None:
        """Start trials: of selections, from the smallest density up, then of everything."""
        dense = [index for index, one in enumerate(self._candidates) if one.density == 1]
        alive = [*range(int(self._options.spare), len(self._candidates) - len(dense)), *reversed(dense)]
        self._rounds = _Rounds(alive, [[] for _ in self._candidates], [[] for _ in self._candidates])
        self._state, self._current = _State.TRIAL, int(alive[0])

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
        mine = self._timer.lap(exposed, _WINDOW if self._state is _State.SETTLED else self._options.trial)
        if mine is not None:
            seconds, waiting = context.mean(mine)
            if self._state is _State.TRIAL:
                self._note_trial(context, seconds, waiting)
            elif self._state is _State.PROBE:
                self._note_probe(context, seconds)
            else:
                self._note_window(context, seconds)
        if not self._history or self._history[-1][1] != self._current:
            self._history.append([self._steps, self._current])
            if self._options.record and context.rank == 0:
                write(Path(self._options.record), [(at, self._candidates[index]) for at, index in self._history])
        self._steps += 1
        if self._state is not _State.SETTLED:
            self._tried += 1
            context.events["trial_steps"] += 1

    def _note_trial(self, context: BucketContext, seconds: float, waiting: float) -> None:
        rounds, current = self._rounds, self._current
        place, times = rounds.alive.index(current), rounds.times[current]
        times.append(seconds)
        rounds.waits[current].append(waiting)
        rounds.made += 1
        remaining = rounds.alive[place + 1 :]
        first_round, shortest = len(times) == 1, min(rounds.times[index][0] for index in rounds.alive[: place + 1])
        if first_round and seconds > _HOPELESS * shortest:
            if self._candidates[current].density < 1:
                remaining = []  # they send more, and would take longer still
            rounds.alive = [*rounds.alive[:place], *remaining]
        if remaining:
            self._current = remaining[0]
        else:
            self._end_round(context)

    def _end_round(self, context: BucketContext) -> None:
        rounds = self._rounds
        ratios, limit = rounds.ratios(), 1 + self._options.max_exposed
        certain = len(rounds.times[rounds.alive[0]]) >= _CERTAIN
        if certain:  # drop what was too slow in each round; certain if the largest of the rest was so in none
            rounds.alive = [index for index in rounds.alive if min(ratios[index]) <= limit]
            certain = len(rounds.alive) == 1 or max(ratios[max(rounds.alive)]) <= limit
        if self._options.spare and rounds.alive == [1] and not rounds.times[0]:
            rounds.times[1], rounds.waits[1] = [], []  # a new first round, of the two smallest
            rounds.alive, self._current = [0, 1], 0
            return
        steps = (rounds.made + len(rounds.alive)) * self._options.trial  # with another round
        if certain or steps > self._options.trial_steps:
            chosen = max(index for index in rounds.alive if median(ratios[index]) <= limit)
            self._decide(context, chosen, ratios[chosen])
        else:
            self._current = rounds.alive[0]

    def _decide(self, context: BucketContext, chosen: int, ratios: Sequence[float]) -> None:
        self._state, self._current, self._decision = _State.SETTLED, chosen, _Decision(chosen)
        context.events["decisions"] += 1
        of_each = zip(self._candidates, self._rounds.times, strict=True)
        measured = {str(one): median(times) for one, times in of_each if times}
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
        """Count the exposed share of the shortest step; if it is more than a half, propose once what shortens it.

        That is a lower density if bytes take the time, and local steps if messages do, or if no lower one was measured.
        """
        times = {index: median(times) for index, times in enumerate(self._rounds.times) if times}
        shortest = min(times, key=lambda index: times[index])
        seconds, waiting = times[shortest], median(self._rounds.waits[shortest])
        share = waiting / seconds
        context.events["trial_exposed_share"] = share  # type: ignore[assignment]
        if context.rank or share <= _WAITING or self._proposed:
            return
        self._proposed = True
        if self._bytes_take_the_time(times):
            remedy = f"try densities=({_LEAST:g},) first, which costs less accuracy than local steps"
        else:
            # No backward pass hides the exchange after local steps: propose a number that takes as long as it does.
            steps = 2 ** math.ceil(math.log2(seconds / max(seconds - waiting, seconds / _MOST_STEPS)))
            remedy = (
                f"exchange less often, by hvs.LocalOptimizer with local_steps={steps}, or {steps} times those that you "
                "have"
            )
        _LOG.warning(
            "even at density %s, where steps are shortest, ranks wait for %.0f %% of a step (%.1f of %.1f ms): %s "
            "(docs/local-steps.md)",
            *(self._candidates[shortest], 100 * share, 1000 * waiting, 1000 * seconds, remedy),
        )

    def _bytes_take_the_time(self, tried: Iterable[int]) -> bool:
        """Return whether ranks waited less at the lowest density than at the next one, and a lower one was measured."""
        lowest, *others = sorted(index for index in tried if self._candidates[index].density < 1)
        waits = [median(self._rounds.waits[index]) for index in (lowest, *others[:1])]
        return self._candidates[lowest].density > _LEAST and waits[0] < _SHORTER * waits[-1]

    def _note_window(self, context: BucketContext, seconds: float) -> None:
        now = self._decision
        now.windows += 1
        # Until a window has confirmed it, the reference is the time in the trials.
        reference = now.reference or median(self._rounds.times[now.chosen])
        drifts = not reference / _DRIFT < seconds < reference * _DRIFT
        if not (now.reference or drifts):
            now.reference = seconds
        now.drifted = now.drifted + 1 if drifts else 0
        if now.drifted >= 2 and self._affordable(self._options.trial_steps):  # one window may be an accident
            self._restart(context, f"a step takes {1000 * seconds:.1f} ms instead of {1000 * reference:.1f}")
        elif not drifts and now.windows >= now.patience and self._affordable(self._options.trial):
            now.windows, now.patience = 0, 2 * now.patience
            if now.chosen + 1 < len(self._candidates):
                self._state, self._current = _State.PROBE, now.chosen + 1

    def _affordable(self, steps: int) -> bool:
        return self._tried + steps <= _CREDIT + _SHARE * self._steps

    def _note_probe(self, context: BucketContext, seconds: float) -> None:
        now, probed = self._decision, self._current
        self._state, self._current = _State.SETTLED, now.chosen
        if seconds <= (1 + self._options.max_exposed) * now.reference and self._affordable(self._options.trial_steps):
            self._restart(context, f"a step at density {self._candidates[probed]} takes {1000 * seconds:.1f} ms")

    def _restart(self, context: BucketContext, why: str) -> None:
        if context.rank == 0:
            _LOG.info("%s: trying the densities again", why)
        self._start()

    def state_dict(self) -> dict[str, Any]:
        """Return decisions and measurements that all ranks share; a trial in progress is repeated."""
        return {
            "state": self._state.value,
            "current": self._current,
            **asdict(self._rounds),
            **asdict(self._decision),
            "steps": self._steps,
            "tried": self._tried,
            "history": [list(entry) for entry in self._history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``; ValueError if a value is invalid."""
        count, kind = len(self._candidates), _State(state["state"])
        history = [[checked_integer(at, "step of a decision"), index] for at, index in state["history"]]
        indices = [state["chosen"], state["current"], *state["alive"], *(index for _, index in history)]
        fits = all(checked_integer(index, "index of a density") < count for index in indices)
        if not fits or {len(state["times"]), len(state["waits"])} != {count}:
            raise ValueError(f"the state of measured densities does not fit {count} of them: {state!r:.200}")
        times = [checked_numbers(one, "times of measured", finite=True) for one in state["times"]]
        waits = [
            checked_numbers(one, "waits of measured", len(own), finite=True)
            for one, own in zip(state["waits"], times, strict=True)
        ]
        names = ("made", "drifted", "windows", "patience", "steps", "tried")
        made, *watched, steps, tried = (checked_integer(state[name], f"{name} of measured") for name in names)
        reference = checked_number(state["reference"], "reference of measured", finite=True)
        self._rounds = _Rounds(list(state["alive"]), times, waits, made)
        self._decision = _Decision(state["chosen"], reference, *watched)
        self._state, self._current, self._history = kind, state["current"], history
        self._steps, self._tried, self._last = steps, tried, math.inf
        self._timer.reset()
