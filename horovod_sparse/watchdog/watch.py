"""Notices ranks that leave or stall, while others wait for them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

from mpi4py import MPI

from horovod_sparse.mpi.lifetime import ADVICE, inside_mpi, on_leaving
from horovod_sparse.watchdog.abort import abort
from horovod_sparse.watchdog.report import Limits, Progress, report

_LOG = logging.getLogger("horovod_sparse")

# Tags of this communicator; the collectives' messages have lower ones.
_LEAVES = 32767  # the largest tag that every MPI allows
_ASKS = 32766
_ANSWERS = 32765

_PERIOD = 1.0  # seconds between two looks
_PATIENCE = 3.0  # seconds for an answer
_FAREWELL = 5.0  # seconds for what a rank has sent before it left, and for adding that up

# Gives the function that tells how far an exchange has come; None: there will be no more.
Source: TypeAlias = Callable[[], Callable[[], Progress] | None]


@dataclass
class _Wait:
    """A wait for one bucket, or in one call: since when, and when the others were asked about it.

    It is reported when it has lasted for ``due`` seconds. Times are in seconds of the monotonic clock.
    """

    place: tuple[int, int, str]
    since: float
    due: float
    asked: float | None = None


class Watch:
    """A thread that looks once a second whether an exchange goes on.

    A rank that waits too long asks all others how far they have come. They are asked, and answer, by this thread,
    whatever their program is doing; a rank is not asked again before it has answered, so that a rank that is stopped
    finds one message from each other one at most.

    Horovod's own exchange fails on all ranks when one of them shuts Horovod down; MPI's collectives would wait.

    Args:
        comm: The communicator of the ranks that exchange; this thread takes the highest tags.
        progress: Gives the function that tells how far this rank has come; None ends the watch.
        names: The parameters of every bucket.
        limits: How long a bucket may wait.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        progress: Source,
        names: Sequence[Sequence[str]],
        limits: Limits,
    ) -> None:
        self._comm = comm
        self._progress = progress
        self._names = names
        self._limits = limits
        self._rank = comm.Get_rank()
        self._others = set(range(comm.Get_size())) - {self._rank}
        self._process = os.getpid()
        world = MPI.COMM_WORLD.Get_group()
        self._world_rank = comm.Get_group().Translate_ranks(range(comm.Get_size()), world)  # names for people
        self._world_size = world.Get_size()
        self._left: dict[int, float] = {}  # ranks that have left the program, and when it was noticed
        self._answers: dict[int, Progress] = {}
        self._unanswered: set[int] = set()
        self._sending: list[MPI.Request] = []
        self._wait: _Wait | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="horovod_sparse_watch", daemon=True)
        self._thread.start()
        on_leaving(self._leave, self._who_left)

    def _leave(self) -> None:
        forked = os.getpid() != self._process  # a copy of this process, which is no rank of its own
        if forked:
            return
        self.end()
        self._thread.join(10 * _PERIOD)
        with contextlib.suppress(RuntimeError), inside_mpi():  # nobody to tell where MPI is finalized already
            for rank in self._others:
                self._comm.send(None, rank, _LEAVES)  # messages as short as this are sent without waiting

    def end(self) -> None:
        """Lets the thread end; farewells are still said, and heard."""
        self._end.set()

    def _who_left(self) -> str:
        self._hear_farewells(time.monotonic())
        return next((self._has_left(rank) for rank in self._left), "")

    def _has_left(self, rank: int) -> str:
        return f"rank {self._world_rank[rank]} of {self._world_size} has left the program or shut MPI down"

    def _run(self) -> None:
        while not self._end.wait(_PERIOD):
            progress = self._progress()
            if progress is None:
                return
            try:
                with inside_mpi():
                    self._look(progress())
            except RuntimeError:  # MPI is finalized: who still waits is told by inside_mpi, too
                return
            del progress  # not kept alive while this thread sleeps

    def _look(self, mine: Progress) -> None:
        now = time.monotonic()
        self._talk(mine)
        if not mine.waits:
            self._wait = None
            return
        place = (*mine.place, mine.call)
        if self._wait is None or self._wait.place != place:
            self._wait = _Wait(place, now, due=self._limits.after(0))
        self._check_left(mine, self._wait.since, now)
        self._check_stall(mine, self._wait, now)

    def _talk(self, mine: Progress) -> None:
        """Reads what has arrived, and tells who asks how far this rank has come."""
        self._sending = [request for request in self._sending if not request.Test()]
        for rank, _ in self._received(_ASKS):
            self._send(astuple(mine), rank, _ANSWERS)
        for rank, answer in self._received(_ANSWERS):
            self._answers[rank] = Progress(*answer)
            self._unanswered.discard(rank)

    def _received(self, tag: int) -> list[tuple[int, Any]]:
        """Messages that have arrived, with their senders."""
        messages, status = [], MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            source = status.Get_source()
            messages.append((source, self._comm.recv(source=source, tag=tag)))
        return messages

    def _send(self, message: Any, rank: int, tag: int) -> None:
        self._sending.append(self._comm.isend(message, rank, tag))  # never waits: the other rank may be stopped

    def _ask(self) -> None:
        self._answers.clear()  # those of an earlier stall
        for rank in self._others - self._unanswered:
            self._send(None, rank, _ASKS)
        self._unanswered = set(self._others)

    def _check_stall(self, mine: Progress, wait: _Wait, now: float) -> None:
        """Asks the others in time, and reports what they say when the wait is too long."""
        waited = now - wait.since
        if wait.asked is None and waited >= wait.due - _PATIENCE:
            self._ask()
            wait.asked = now
        if wait.asked is None or now - wait.asked < _PATIENCE or waited < wait.due:
            return
        wait.asked, wait.due = None, self._limits.after(waited)
        names = self._names[mine.bucket] if mine.stage else ()
        text = report(mine, names, {self._world_rank[rank]: self._answers.get(rank) for rank in self._others})
        text, limit = f"has waited {waited:.0f} s in {text}", self._limits.abort
        if 0 < limit <= waited:
            abort(f"{text}; ends all ranks after stall_abort={limit:g} s")
        coming = f"; all ranks are ended when it has been {limit:g} s (stall_abort; 0 waits for ever)" if limit else ""
        _LOG.warning("rank %d: %s%s", self._world_rank[self._rank], text, coming)

    def _check_left(self, mine: Progress, since: float, now: float) -> None:
        """Ends all ranks when one has left that is still waited for."""
        self._hear_farewells(now)
        if mine.stage == "apply":
            return  # everything has arrived
        for rank, noticed in self._left.items():
            if now - max(noticed, since) >= _FAREWELL:
                abort(f"{self._has_left(rank)}, but {mine.call or f'bucket {mine.bucket}'} waits for it: {ADVICE}")

    def _hear_farewells(self, now: float) -> None:
        for rank, _ in self._received(_LEAVES):
            self._left.setdefault(rank, now)
