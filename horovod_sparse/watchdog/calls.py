"""Calls that all ranks make together, such as those that make an optimizer, are watched before there is an exchange."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from horovod_sparse.mpi.lifetime import current_call
from horovod_sparse.watchdog.report import Limits, Progress, limits
from horovod_sparse.watchdog.watch import Source, Watch

_exchanges: list[Source] = []
_watch: CallWatch | None = None
_all_take_part = True  # in every call


def watch_exchange(comm: MPI.Intracomm, progress: Source, names: Sequence[Sequence[str]], stall: Limits) -> None:
    """Begins to watch an exchange, and the calls between its steps; arguments as of ``Watch``."""
    _exchanges.append(progress)
    Watch(comm, progress, names, stall)


def watch_calls(comm: MPI.Intracomm | None = None) -> None:
    """Begins to watch calls, also those in which communicators are made.

    Args:
        comm: All ranks, so that they can be asked; all of them call this. None: there is no such communicator so far.
    """
    global _watch
    if _watch is not None and comm is None:
        return
    if _watch is not None:
        _watch.end()
    _watch = CallWatch(MPI.COMM_SELF.Dup() if comm is None else comm)


def some_ranks_call() -> None:
    """A call concerns some ranks only: from now on, one that has left need not be missed."""
    global _all_take_part
    _all_take_part = False


class CallWatch(Watch):
    """The watch of a process, which tells others how far it has come, and reports a call where no exchange does.

    Limits are those of Horovod's environment variables, as far as they make sense: whoever makes an optimizer is told.

    Args:
        comm: All ranks, or this one alone.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        try:
            stall = limits(None, None)
        except ValueError:  # maybe on this rank alone, which must not leave the others
            stall = Limits(60.0, 600.0)
        super().__init__(comm, lambda: _call_in_progress, (), stall)

    def _look(self, mine: Progress) -> None:
        of_exchange = _newest()
        if of_exchange is None:
            super()._look(mine)
        else:
            self._wait = None
            self._talk(of_exchange)

    def _check_left(self, mine: Progress, since: float, now: float) -> None:
        if _all_take_part:
            super()._check_left(mine, since, now)


def _call_in_progress() -> Progress:
    return Progress(0, 0, call=current_call())


def _newest() -> Progress | None:
    """Progress of the exchange that was made last."""
    while _exchanges:
        progress = _exchanges[-1]()
        if progress is not None:
            return progress()
        _exchanges.pop()
    return None
