"""Stalls: after how long a bucket that waits is reported, and what the report says."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Of waiting, after which a job is ended that nobody has set a limit for: as long as torch waits for NCCL. Hours of many
# nodes cost more than to start again from a checkpoint.
_ABORT = 600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the time that a bucket waits for other ranks.

    Attributes:
        report: Seconds after which it is reported, and again after as many more; 0: never.
        abort: Seconds after which all ranks are ended; 0: never.
    """

    report: float
    abort: float

    def after(self, waited: float) -> float:
        """Seconds of waiting at which something is to be done next; infinity: never."""
        report = (waited // self.report + 1) * self.report if self.report else math.inf
        return min(report, self.abort if self.abort > waited else math.inf)


def limits(timeout: float | None, abort: float | None) -> Limits:
    """Limits that the user gave, or else those that Horovod was told for its own exchange.

    Args:
        timeout: Seconds; None: ``HOROVOD_STALL_CHECK_TIME_SECONDS``, by default 60.
        abort: Seconds; None: ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, by default 600, or twice the timeout if that is
            more, so that there is a report before. Both are 0 by default where ``HOROVOD_STALL_CHECK_DISABLE`` is set,
            and so is this one where the timeout is 0.

    Raises:
        ValueError: A value is no number of seconds.
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
        raise ValueError(f"{name} must be a number of seconds, or 0 for never, not {value!r}")
    return seconds


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one rank.

    Attributes:
        step: Steps that were exchanged before this one, since the optimizer was made.
        bucket: The bucket that is exchanged, or the next one.
        stage: What is done with it, by the names of the pipeline's spans; empty: nothing yet.
        call: The function of this library in which the program waits for the others before it comes to this bucket;
            empty: none.
    """

    step: int
    bucket: int
    stage: str = ""
    call: str = ""

    @property
    def waits(self) -> bool:
        """Tells if it may be other ranks that keep this one from going on."""
        return bool(self.stage or self.call)

    @property
    def place(self) -> tuple[int, int]:
        """Step and bucket: what all ranks must come to."""
        return self.step, self.bucket

    def __str__(self) -> str:
        call = f"{self.call} before " if self.call else ""
        return f"{call}bucket {self.bucket} of step {self.step}" + (f", stage {self.stage}" if self.stage else "")


def report(mine: Progress, parameters: Sequence[str], answers: Mapping[int, Progress | None]) -> str:
    """For what and for whom a rank waits.

    Args:
        mine: Where it waits.
        parameters: Names of the bucket's parameters.
        answers: How far each other rank says it has come; None: it did not answer.
    """
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, theirs in sorted(answers.items()):
        ranks_of[_describe(mine, theirs)].append(rank)
    names = ", ".join(parameters[:3]) + (", ..." if len(parameters) > 3 else "")
    where = f"stage {mine.stage} of bucket {mine.bucket} ({names}) in step {mine.step}" if mine.stage else str(mine)
    others = "; ".join(f"{_ranks(ranks)}: {what}" for what, ranks in sorted(ranks_of.items()))
    return f"{where}: {others or 'some ranks are missing, which cannot be asked before they come there'}"


def _describe(mine: Progress, theirs: Progress | None) -> str:
    if theirs is None:
        return "missing, gives no answer (stopped, or cut off from here)"
    if theirs.waits:
        return "waits there too" if theirs == mine else f"is in {theirs}"
    if theirs.place > mine.place:
        return f"has gone on, to before {theirs}"
    if mine.call and theirs.place == mine.place:
        return "missing, its program has not come there"
    return f"missing, its program has not come to {theirs}"


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1, 3-5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
