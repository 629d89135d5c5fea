"""Stall reports: time limits, and the text of a report."""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Default seconds of waiting after which the job is ended: torch's timeout for NCCL. Hours of many nodes cost more than
# a restart from a checkpoint.
_ABORT = 600.0

_UNKNOWN = "some ranks are missing (which ones is unknown until all ranks have completed a call together)"


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of a wait for other ranks.

    Attributes:
        report: Seconds until the first report, and between reports; 0: never.
        abort: Seconds after which all ranks are ended; 0: never.
    """

    report: float
    abort: float

    def after(self, waited: float) -> float:
        """Return the length of the wait, in seconds, at which the next report or abort is due; infinity: never."""
        report = (waited // self.report + 1) * self.report if self.report else math.inf
        return min(report, self.abort if self.abort > waited else math.inf)


def limits(timeout: float | None, abort: float | None) -> Limits:
    """Return the given limits, or else those of Horovod's environment variables.

    If ``HOROVOD_STALL_CHECK_DISABLE`` is set, None means 0 for both limits.

    Args:
        timeout: Seconds until a report; None: ``HOROVOD_STALL_CHECK_TIME_SECONDS``, by default 60.
        abort: Seconds until all ranks are ended; None: ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, by default 600 or twice
            the timeout, whichever is longer, so that a report comes first. The default is 0 if the timeout is 0.

    Raises:
        ValueError: A limit is not a finite number of at least 0.
    """
    checked = not _from_environment("HOROVOD_STALL_CHECK_DISABLE", 0)
    if timeout is None:
        timeout = _from_environment("HOROVOD_STALL_CHECK_TIME_SECONDS", 60) * checked
    timeout = _seconds("stall_timeout", timeout)
    if abort is None:
        default = max(_ABORT, 2 * timeout) if timeout else 0.0
        abort = _from_environment("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default) * checked
    return Limits(timeout, _seconds("stall_abort", abort))


def _from_environment(variable: str, default: float) -> float:
    return _seconds(variable, os.environ.get(variable) or default)


def _seconds(name: str, value: float | str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} must be a number of seconds >= 0 (0: never), not {value!r}")
    return seconds


Position: TypeAlias = tuple[int, int]
"""(step, bucket)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one exchange on one rank.

    Attributes:
        step: Number of the step, from 0.
        bucket: Bucket in exchange, or the next one if none is.
        stage: Pipeline stage of the bucket; empty: its exchange has not started.
    """

    step: int
    bucket: int
    stage: str = ""

    @property
    def position(self) -> Position:
        """Ordering key (step, bucket)."""
        return self.step, self.bucket

    def __str__(self) -> str:
        return f"bucket {self.bucket} of step {self.step}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Activity of one process.

    Attributes:
        calls: Calls in which the program waits for other ranks.
        exchanges: Progress of each exchange, by a number that is the same on all its ranks.
        left: World ranks whose farewells have arrived.
    """

    calls: tuple[str, ...]
    exchanges: Mapping[int, Progress]
    left: tuple[int, ...] = ()

    @property
    def newest(self) -> int | None:
        """Number of the newest exchange; None: there is none."""
        return max(self.exchanges, default=None)

    def waits_in(self, besides: int | None = None) -> str:
        """Return where the program waits, except in exchange ``besides``; empty: nowhere."""
        running = [
            f"stage {progress.stage} of {progress}{of_optimizer(number)}"
            for number, progress in self.exchanges.items()
            if progress.stage and number != besides
        ]
        return next(iter([*running, *self.calls]), "")


def of_optimizer(number: int) -> str:
    """Return the suffix that names an optimizer; empty for the first, which is usually the only one."""
    return f" of optimizer {number}" if number > 1 else ""


@dataclass(frozen=True)
class Wait:
    """A wait for other ranks, in a bucket's exchange or in a call.

    Attributes:
        mine: Snapshot of this process.
        number: Number of the bucket's exchange; in a call, of the newest exchange, or None if there is none.
        call: Name of the call; empty: the wait is for a bucket.
        parameters: Names of the bucket's parameters.
    """

    mine: Snapshot
    number: int | None
    call: str = ""
    parameters: Sequence[str] = ()

    @property
    def progress(self) -> Progress:
        """Progress of this rank in exchange ``number``; bucket 0 of step 0 if there is none."""
        return Progress(0, 0) if self.number is None else self.mine.exchanges[self.number]

    def __str__(self) -> str:
        number = self.number or 1
        if self.call:
            return self.call + (f", before {self.progress}{of_optimizer(number)}" if self.number else "")
        names = ", ".join(self.parameters[:3]) + (", ..." if len(self.parameters) > 3 else "")
        progress = self.progress
        where = f"stage {progress.stage} of bucket {progress.bucket} ({names}) in step {progress.step}"
        return where + of_optimizer(number)

    def report(self, answers: Mapping[int, Snapshot | None], left: Iterable[int]) -> str:
        """Return where this rank waits, and what each other rank is doing.

        Args:
            answers: Snapshots of the other ranks by world rank; None: no answer.
            left: World ranks whose farewells have arrived here; others may have heard of more.
        """
        left = {*left, *itertools.chain.from_iterable(theirs.left for theirs in answers.values() if theirs)}
        ranks_of: defaultdict[str, list[int]] = defaultdict(list)
        for rank, theirs in sorted(answers.items()):
            ranks_of["has left" if rank in left else self._describe(theirs)].append(rank)
        others = "; ".join(f"{_ranks(ranks)}: {what}" for what, ranks in sorted(ranks_of.items()))
        return f"{self}: {others or _UNKNOWN}"

    def shared_by(self, theirs: Snapshot | None) -> bool:
        """Return whether another rank waits in the same call or exchange; None: it gave no answer."""
        if theirs is None:
            return False
        if self.call:
            return self.call in theirs.calls
        return self.number is not None and bool(theirs.exchanges.get(self.number, Progress(0, 0)).stage)

    def _describe(self, theirs: Snapshot | None) -> str:
        if theirs is None:
            return "missing, gives no answer (stopped or unreachable)"
        mine = self.progress
        their = mine if self.number is None else theirs.exchanges.get(self.number)
        if self.call and self.call in theirs.calls and their == mine:
            return "waits there too"
        if their is not None and their.stage:
            if their == mine and not self.call:
                return "waits there too"
            return f"is in stage {their.stage} of {their}{of_optimizer(self.number or 1)}"
        if their is not None and their.position > mine.position:
            return f"is ahead, next is {their}"
        elsewhere = theirs.waits_in(besides=self.number)
        if elsewhere:
            return f"missing, waits in {elsewhere}"
        if their is None:
            return "missing, has no such optimizer (not yet created or already deleted)"
        if self.call and their.position == mine.position:
            return "missing, has not reached this call"
        return f"missing, has not reached {their}"


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as ``rank 1`` or ``ranks 1, 3-5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
