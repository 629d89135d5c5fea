"""Detection of ranks that leave or stall while others wait for them."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from horovod_sparse.control.link import Link
from horovod_sparse.control.report import Limits, Position, Progress, Snapshot, Wait, limits, of_optimizer
from horovod_sparse.transport.base import Transport

if TYPE_CHECKING:
    from horovod_sparse.control.lifecycle import Lifecycle

_LOG = logging.getLogger("horovod_sparse")
ADVICE = "let every rank take the same number of steps (equal shares of the data, drop_last=True)"

_PERIOD = 0.5  # seconds between two checks
_PATIENCE = 3.0  # seconds to wait for answers
_GRACE = 3.0  # seconds that messages sent before a farewell may take to arrive


class FinalizedError(RuntimeError):
    """Communication was attempted after MPI had been finalized."""


class Source(Protocol):
    """Gradient exchange as seen by the watch, which calls its methods from another thread."""

    def progress(self) -> Progress:
        """Return the current progress of the exchange."""

    def leaves_at(self) -> Position:
        """Return the first bucket that this rank will not exchange if it begins to leave now."""

    def names(self, bucket: int) -> Sequence[str]:
        """Return the names of the gradients in a bucket."""


Reference: TypeAlias = Callable[[], Source | None]


@dataclass(eq=False)
class Call:
    """Call in which the program waits for other ranks.

    Attributes:
        name: Name of the call, for reports.
        transport: Transport of the ranks that the call waits for; None: not known yet.
        stalls: Whether a long wait is reported and finally ends the job.
    """

    name: str
    transport: Transport | None
    stalls: bool = True


@dataclass(frozen=True)
class _Exchange:
    """Watched exchange; the fields are described in ``Watch.add``."""

    source: Reference
    limits: Limits
    link: Link


@dataclass
class _Farewell:
    """Farewell of a rank.

    Attributes:
        noticed: Time of arrival, in seconds of the monotonic clock.
        leaves_at: First bucket that the rank will not exchange, for each exchange.
        calls: Names of the calls that the rank still takes part in.
    """

    noticed: float
    leaves_at: dict[int, Position]
    calls: tuple[str, ...]


@dataclass
class _Timer:
    """Times of one wait, in seconds.

    Attributes:
        position: Bucket that is waited for, or None in a call; a new position starts a new timer.
        since: Start of the wait, by the monotonic clock.
        due: Length of the wait at which the next report or abort is due.
        asked: Time at which other ranks were queried for that, by the monotonic clock; None: not yet.
        reports: Whether all of them were queried, as the rank before this one does not wait.
    """

    position: Position | None
    since: float
    due: float
    asked: float | None = None
    reports: bool = False


class Watch:
    """Thread that checks twice a second whether this rank is waiting for other ranks.

    If a wait is too long, it queries other ranks. Their watches answer even while their programs are busy. If this
    rank waits for a rank that has left, it ends the job, because collectives of MPI would never return.
    """

    def __init__(self, process: Lifecycle) -> None:
        self._process = process
        self._lock = threading.RLock()
        self._world: Link | None = None
        self._exchanges: dict[int, _Exchange] = {}
        self._farewells: dict[int, _Farewell] = {}  # by world rank
        self._timers: dict[Hashable, _Timer] = {}
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def start(self, world: Transport | None = None) -> None:
        """Start watching calls, over the private transport of all ranks if it has been created."""
        with self._process.communicating(), self._lock:  # `close` is called at exit from now on
            if world is not None:
                self._world = Link(world)
            if self._thread is None:
                self._farewells.clear()
                self._end = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=[self._end], name="horovod_sparse_watch", daemon=True
                )
                self._thread.start()

    def add(self, transport: Transport, source: Reference, limits: Limits) -> None:
        """Start watching an exchange. A collective operation.

        Args:
            transport: Transport of the exchange's ranks.
            source: Weak reference to the exchange.
            limits: Time limits for buckets of this exchange, and for calls while it is the newest one.
        """
        # Ranks may have added different exchanges before. The maximum is unused on all ranks of the new one.
        number = int(transport.allgather_integers(max(self._exchanges, default=0) + 1).max())
        with self._lock:
            self._exchanges[number] = _Exchange(source, limits, Link(transport))
        self.start()

    def say_farewell(self) -> None:
        """Announce that this rank leaves, and which buckets and calls it still takes part in."""
        with contextlib.suppress(FinalizedError), self._lock, self._process.communicating():
            sources = {number: exchange.source() for number, exchange in self._exchanges.items()}
            leaves_at = {number: source.leaves_at() for number, source in sources.items() if source is not None}
            for link in self._links():
                link.say_farewell((leaves_at, self._process.background_calls))

    def close(self) -> None:
        """End the thread, and announce for the last time that this rank leaves."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self.say_farewell()
        with self._lock:
            self._thread, self._world = None, None
            self._exchanges.clear()
            self._timers.clear()

    def who_left(self, patience: float = 0.0) -> str:
        """Return a sentence that names the first rank known to have left; empty: none.

        Args:
            patience: Seconds to wait for a farewell. The connections of a rank that ends close before it says one.
        """
        until = time.monotonic() + patience
        while True:
            with self._lock:
                self._hear()
                if self._farewells or time.monotonic() >= until:
                    return next(map(self._has_left, self._farewells), "")
            time.sleep(_PERIOD / 10)

    def _links(self) -> Iterator[Link]:
        if self._world is not None:
            yield self._world
        yield from (exchange.link for exchange in self._exchanges.values())

    def _run(self, end: threading.Event) -> None:
        with contextlib.suppress(FinalizedError):  # callers that still wait get the error from `communicating`
            while not end.wait(_PERIOD):
                with self._process.communicating(), self._lock:
                    self._look()

    def _look(self) -> None:
        mine = self._snapshot()
        self._hear()
        for link in self._links():
            link.talk(mine)
        waits = dict(self._waits(mine))
        self._timers = {key: self._timer(key, wait) for key, wait in waits.items()}
        for key, wait in waits.items():
            self._check_left(key, wait, self._timers[key])
            self._check_stall(key, wait, self._timers[key])

    def _snapshot(self) -> Snapshot:
        sources = {number: exchange.source() for number, exchange in self._exchanges.items()}
        progress = {number: source.progress() for number, source in sources.items() if source is not None}
        if self._world is not None:  # reaches the ranks of exchanges of all ranks when these are deleted
            size = len(self._world.ranks)
            known = self._exchanges.items()
            self._exchanges = {number: one for number, one in known if number in progress or len(one.link.ranks) < size}
        return Snapshot(tuple(call.name for call in self._process.calls), progress, tuple(self._farewells))

    def _waits(self, mine: Snapshot) -> Iterator[tuple[Hashable, Wait]]:
        for number, progress in mine.exchanges.items():
            if progress.stage:
                source = self._exchanges[number].source()
                yield number, Wait(mine, number, parameters=source.names(progress.bucket) if source else ())
        for call in self._process.calls:
            yield call, Wait(mine, mine.newest, call.name)

    def _limits(self, wait: Wait) -> Limits:
        return _default_limits() if wait.number is None else self._exchanges[wait.number].limits

    def _link(self, wait: Wait) -> Link | None:
        """Return the link over which to query the ranks that are waited for; None: there is none."""
        if self._world is not None and (wait.call or wait.number is None):
            return self._world
        return None if wait.number is None else self._exchanges[wait.number].link

    def _timer(self, key: Hashable, wait: Wait) -> _Timer:
        known, position = self._timers.get(key), None if wait.call else wait.progress.position
        if known is not None and known.position == position:
            return known
        return _Timer(position, time.monotonic(), due=self._limits(wait).after(0))

    def _check_stall(self, key: Hashable, wait: Wait, timer: _Timer) -> None:
        """Query other ranks ahead of the limit, and at the limit report what they are doing or end the job.

        Of the ranks that wait, the first and those that follow one that does not wait report. The rest query the one
        before them: if each queried all others, there would be P^2 messages.
        """
        if isinstance(key, Call) and not key.stalls:
            return
        now, link = time.monotonic(), self._link(wait)
        waited, before = now - timer.since, None if link is None else self._before(key, link)
        if timer.asked is None and waited >= timer.due - (1 if before is None else 2) * _PATIENCE:
            timer.asked, timer.reports = now, before is None
            if link is not None:
                link.ask(link.ranks if before is None else [before])
        if timer.asked is None:
            return
        answers = {} if link is None else link.answers(timer.asked)
        answered = now - timer.asked >= _PATIENCE
        if link is not None and before is not None and not timer.reports:
            if wait.shared_by(answers[before]):
                self._leave_to(before, wait, timer, waited)
            elif answered or answers[before] is not None:
                timer.asked, timer.reports = now, True
                link.ask(link.ranks)
        elif answered and waited >= timer.due:
            self._report(wait, timer, waited, answers)

    def _leave_to(self, before: int, wait: Wait, timer: _Timer, waited: float) -> None:
        """Leave the report to an earlier rank, which may have waited for less time; end the job if it does not."""
        limits, grace = self._limits(wait), 2 * _PATIENCE
        if 0 < limits.abort <= waited - grace:
            self._process.abort(
                f"has waited {waited:.0f} s in {wait}: rank {before}: waits there too; ends all ranks after "
                f"stall_abort={limits.abort:g} s"
            )
        if waited >= timer.due:
            timer.asked = None
            timer.due = min(limits.after(waited), max(waited, limits.abort) + grace if limits.abort else math.inf)

    def _before(self, key: Hashable, link: Link) -> int | None:
        """Return the world rank of the rank before this one among those that wait for each other; None: the first."""
        own, ranks = self._process.job.rank, link.ranks
        if isinstance(key, Call) and key.transport is not None:
            ranks = [rank for rank in key.transport.members if rank in ranks]
        at = ranks.index(own) if own in ranks else 0
        return ranks[at - 1] if at else None

    def _report(self, wait: Wait, timer: _Timer, waited: float, answers: Mapping[int, Snapshot | None]) -> None:
        limits = self._limits(wait)
        timer.asked, timer.due = None, limits.after(waited)
        text = f"has waited {waited:.0f} s in {wait.report(answers, self._farewells)}"
        if 0 < limits.abort <= waited:
            self._process.abort(f"{text}; ends all ranks after stall_abort={limits.abort:g} s")
        coming = f"; ends all ranks after {limits.abort:g} s (stall_abort; 0: never)" if limits.abort else ""
        _LOG.warning("rank %d: %s%s", self._process.job.rank, text, coming)

    def _check_left(self, key: Hashable, wait: Wait, timer: _Timer) -> None:
        """End all ranks if a rank that is waited for has left."""
        for rank, farewell in self._farewells.items():
            since = max(farewell.noticed, timer.since)
            if time.monotonic() - since >= _GRACE and self._waits_for(rank, farewell, key, wait):
                what = wait.call or f"{wait.progress}{of_optimizer(wait.number or 1)}"
                self._process.abort(f"{self._has_left(rank)}, but {what} waits for it: {ADVICE}")

    def _waits_for(self, rank: int, farewell: _Farewell, key: Hashable, wait: Wait) -> bool:
        if isinstance(key, Call):
            return key.transport is not None and rank in key.transport.members and key.name not in farewell.calls
        assert wait.number is not None
        if wait.progress.stage == "apply":
            return False  # all messages have arrived
        leaves_at = farewell.leaves_at.get(wait.number)
        return rank in self._exchanges[wait.number].link.ranks and (
            leaves_at is None or wait.progress.position >= leaves_at
        )

    def _hear(self) -> None:
        for link in self._links():
            for rank, (leaves_at, calls) in link.farewells():
                self._farewells[rank] = _Farewell(time.monotonic(), leaves_at, calls)

    def _has_left(self, rank: int) -> str:
        return f"rank {rank} of {self._process.job.size} has left the program or ended communication"


def _default_limits() -> Limits:
    """Return the limits of Horovod's environment variables, or the defaults if those are invalid."""
    try:
        return limits(None, None)
    except ValueError:  # creating an optimizer raises it on all ranks
        return Limits(60.0, 600.0)
