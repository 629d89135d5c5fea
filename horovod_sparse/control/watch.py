"""Detection of ranks that leave or stall while others wait for them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from horovod_sparse.control.link import Link
from horovod_sparse.control.report import Limits, Position, Progress, Snapshot, Wait, limits, of_optimizer
from horovod_sparse.transport.base import Job, Transport

_LOG = logging.getLogger("horovod_sparse")
ADVICE = "let every rank take as many steps (equal shares of the data, drop_last=True)"

_PERIOD = 0.5  # seconds between two looks
_PATIENCE = 3.0  # seconds to wait for an answer
_GRACE = 3.0  # seconds for what a rank sent before it left


class FinalizedError(RuntimeError):
    """MPI has been finalized: nothing can be exchanged any more."""


class Source(Protocol):
    """An exchange of gradients, as the watch sees it; both methods are called from another thread."""

    def progress(self) -> Progress:
        """Return what is being exchanged."""

    def started(self) -> Position:
        """Return the first bucket that this rank will not exchange if it begins to leave now."""


Reference: TypeAlias = Callable[[], Source | None]


@dataclass(eq=False)
class Call:
    """A call in which the program waits for other ranks.

    Attributes:
        name: For reports.
        transport: Connects the ranks that it waits for; None: not known yet.
        stalls: Whether a long wait is reported, and ends the job.
    """

    name: str
    transport: Transport | None
    stalls: bool = True


class Process(Protocol):
    """The watch's view of its process."""

    @property
    def job(self) -> Job:
        """All processes of the launcher."""

    @property
    def calls(self) -> list[Call]:
        """Calls in which the program waits."""

    @property
    def background_calls(self) -> tuple[str, ...]:
        """Names of calls that this rank takes part in on background threads."""

    def communicating(self) -> contextlib.AbstractContextManager[None]:
        """Delay the shutdown of communication."""

    def abort(self, reason: str) -> None:
        """End all ranks."""


@dataclass(frozen=True)
class _Exchange:
    """An exchange that is watched; fields as the arguments of ``Watch.add``."""

    source: Reference
    names: Sequence[Sequence[str]]
    limits: Limits
    link: Link


@dataclass
class _Farewell:
    """Farewell of a rank.

    Attributes:
        noticed: When it arrived, in seconds of the monotonic clock.
        started: For each exchange, the first bucket that the rank will not exchange.
        calls: Names of calls that it still takes part in.
    """

    noticed: float
    started: dict[int, Position]
    calls: tuple[str, ...]


@dataclass
class _Timer:
    """Times of one wait, in seconds.

    Attributes:
        position: Of the wait: another place is another wait.
        since: Start, by the monotonic clock.
        due: Length of the wait at which it is reported next.
        asked: When the other ranks were asked about it, by the monotonic clock; None: not yet.
    """

    position: Position | None
    since: float
    due: float
    asked: float | None = None


class Watch:
    """A thread that looks twice a second whether other ranks keep this one waiting.

    Where a wait is too long, it asks the other ranks what they are doing; their watches answer, whatever their programs
    are doing. Where a rank has left that is waited for, it ends the job: MPI's collectives would wait for ever.

    Args:
        process: Knows the calls in which the program waits, and ends the job.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lock = threading.RLock()
        self._world: Link | None = None
        self._exchanges: dict[int, _Exchange] = {}
        self._farewells: dict[int, _Farewell] = {}  # by world rank
        self._timers: dict[Hashable, _Timer] = {}
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def start(self, world: Transport | None = None) -> None:
        """Begin to watch calls.

        Args:
            world: Private transport of all ranks, if there is one so far.
        """
        with self._process.communicating(), self._lock:  # from now on, `close` is called at the end
            if world is not None:
                self._world = Link(world)
            if self._thread is None:
                self._farewells.clear()
                self._end = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=[self._end], name="horovod_sparse_watch", daemon=True
                )
                self._thread.start()

    def add(self, transport: Transport, source: Reference, names: Sequence[Sequence[str]], limits: Limits) -> None:
        """Begin to watch an exchange; a collective call.

        Args:
            transport: Connects its ranks.
            source: A weak reference to it.
            names: Parameters of every bucket.
            limits: How long one of its buckets may wait, and a call after it was made.
        """
        # The same on all its ranks, also where some of them have made others that these have not.
        number = int(transport.allgather_integers(max(self._exchanges, default=0) + 1).max())
        with self._lock:
            self._exchanges[number] = _Exchange(source, names, limits, Link(transport))
        self.start()

    def say_farewell(self) -> None:
        """Tell all other ranks that this one leaves, and which buckets and calls it still takes part in."""
        with contextlib.suppress(FinalizedError), self._lock, self._process.communicating():
            sources = {number: exchange.source() for number, exchange in self._exchanges.items()}
            started = {number: source.started() for number, source in sources.items() if source is not None}
            for link in self._links():
                link.say_farewell((started, self._process.background_calls))

    def close(self) -> None:
        """Say farewell for the last time, and end the thread."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self.say_farewell()
        with self._lock:
            self._thread, self._world = None, None
            self._exchanges.clear()
            self._timers.clear()

    def who_left(self) -> str:
        """Return which rank has left, in words; empty: none that this one knows of."""
        with self._lock:
            self._hear()
            return next((self._has_left(rank) for rank in self._farewells), "")

    def _links(self) -> Iterator[Link]:
        if self._world is not None:
            yield self._world
        yield from (exchange.link for exchange in self._exchanges.values())

    def _run(self, end: threading.Event) -> None:
        with contextlib.suppress(FinalizedError):  # `communicating` tells whoever still waits
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
        if self._world is not None:  # over which the ranks of an exchange that is gone are reached, too
            self._exchanges = {number: self._exchanges[number] for number in progress}
        return Snapshot(tuple(call.name for call in self._process.calls), progress)

    def _waits(self, mine: Snapshot) -> Iterator[tuple[Hashable, Wait]]:
        for number, progress in mine.exchanges.items():
            if progress.stage:
                yield number, Wait(mine, number, parameters=self._exchanges[number].names[progress.bucket])
        for call in self._process.calls:
            yield call, Wait(mine, mine.newest, call.name)

    def _limits(self, wait: Wait) -> Limits:
        return _default_limits() if wait.number is None else self._exchanges[wait.number].limits

    def _link(self, wait: Wait) -> Link | None:
        """Return the link over which the ranks can be asked that keep this one waiting."""
        if self._world is not None and (wait.call or wait.number is None):
            return self._world
        return None if wait.number is None else self._exchanges[wait.number].link

    def _timer(self, key: Hashable, wait: Wait) -> _Timer:
        known, position = self._timers.get(key), None if wait.call else wait.progress.position
        if known is not None and known.position == position:
            return known
        return _Timer(position, time.monotonic(), due=self._limits(wait).after(0))

    def _check_stall(self, key: Hashable, wait: Wait, timer: _Timer) -> None:
        """Ask the other ranks in time, and report what they are doing when the wait is too long."""
        if isinstance(key, Call) and not key.stalls:
            return
        now, link = time.monotonic(), self._link(wait)
        waited = now - timer.since
        if timer.asked is None and waited >= timer.due - _PATIENCE:
            timer.asked = now
            if link is not None:
                link.ask()
        if timer.asked is None or now - timer.asked < _PATIENCE or waited < timer.due:
            return
        answers = {} if link is None else link.answers(timer.asked)
        limits = self._limits(wait)
        timer.asked, timer.due = None, limits.after(waited)
        text = f"has waited {waited:.0f} s in {wait.report(answers, self._farewells)}"
        if 0 < limits.abort <= waited:
            self._process.abort(f"{text}; ends all ranks after stall_abort={limits.abort:g} s")
        coming = f"; ends all ranks after {limits.abort:g} s (stall_abort; 0 waits for ever)" if limits.abort else ""
        _LOG.warning("rank %d: %s%s", self._process.job.rank, text, coming)

    def _check_left(self, key: Hashable, wait: Wait, timer: _Timer) -> None:
        """End all ranks where one has left that is waited for."""
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
            return False  # everything has arrived
        started = farewell.started.get(wait.number)
        return rank in self._exchanges[wait.number].link.ranks and (
            started is None or wait.progress.position >= started
        )

    def _hear(self) -> None:
        for link in self._links():
            for rank, (started, calls) in link.farewells():
                self._farewells[rank] = _Farewell(time.monotonic(), started, calls)

    def _has_left(self, rank: int) -> str:
        return f"rank {rank} of {self._process.job.size} has left the program or shut MPI down"


def _default_limits() -> Limits:
    """Return the limits of Horovod's environment variables; the usual ones where those make no sense."""
    try:
        return limits(None, None)
    except ValueError:  # whoever makes an optimizer gets the error, on all ranks
        return Limits(60.0, 600.0)
