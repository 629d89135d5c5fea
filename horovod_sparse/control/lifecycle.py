"""Life cycle of this process as a rank of a job: its threads, its use of MPI, leaving and ending the job.

``process`` holds the state that belongs to the process rather than to one optimizer.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from horovod_sparse.control.background import Background, join_ending
from horovod_sparse.control.watch import ADVICE, Call, FinalizedError, Watch
from horovod_sparse.transport.base import Job, Transport

_HOROVOD_SHUT_DOWN = "Horovod has been shut down, here or by a rank that has left the program"


class Lifecycle:
    """Background threads, patched library functions, use of MPI, and shutdown of one process.

    Attributes:
        world: Private transport of all ranks; None until the first collective call of all ranks creates it.
        watch: Watch of this process, which exchanges farewells and progress reports with the other ranks.
    """

    def __init__(self) -> None:
        self.world: Transport | None = None
        self._job: Job | None = None
        self.watch = Watch(self)
        self._state = threading.Condition()  # guards the next four attributes
        self._users = 0  # number of open `communicating` blocks
        self._finalized = ""  # reason why communication is shut down; empty: it is not
        self._calls: list[Call] = []
        self._closing = False
        self._outermost = threading.local()  # outermost call of each thread
        self._threads: weakref.WeakSet[Background] = weakref.WeakSet()
        self._replaced: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        self._is_rank = True
        os.register_at_fork(after_in_child=self._after_fork)

    @property
    def job(self) -> Job:
        """Job that this process has joined."""
        assert self._job is not None
        return self._job

    def join(self, job: Job) -> None:
        """Join a job: ``close`` then runs at exit and before communication is shut down. Later calls do nothing."""
        with self._state:
            if self._job is not None:
                return
            self._job = job
        self._close_at_exit()
        job.on_finalize(self._before_finalize)

    def _before_finalize(self) -> None:
        # On any other thread, Horovod is finalizing MPI, usually because another rank has shut Horovod down.
        if threading.current_thread() is threading.main_thread():
            self.close()
        with self._state:
            self._state.wait_for(lambda: self._users == 0)
            self._finalized = _HOROVOD_SHUT_DOWN
        self._finalized = self.watch.who_left() or _HOROVOD_SHUT_DOWN

    @property
    def calls(self) -> list[Call]:
        """Calls in which the program waits for other ranks."""
        with self._state:
            return list(self._calls)

    @contextmanager
    def communicating(self, call: str = "", transport: Transport | None = None) -> Iterator[None]:
        """Delay the shutdown of communication until the block ends.

        When one rank shuts Horovod down, Horovod's background threads finalize MPI on all ranks, regardless of other
        threads. A thread in the middle of an exchange would crash.

        Args:
            call: Public call in which ranks wait for each other, for stall reports; empty: none. Of nested calls,
                reports name the outermost.
            transport: Transport of the ranks that the call waits for; None: not known yet.

        Raises:
            FinalizedError: Communication has been shut down.
        """
        if transport is not None:
            if transport.job is None:  # the ranks are threads
                yield
                return
            self.join(transport.job)
        with self._state:
            if self._finalized or (self._job is not None and self._job.finalized):
                raise FinalizedError(f"cannot communicate: {self._finalized or _HOROVOD_SHUT_DOWN}: {ADVICE}")
            self._users += 1
        try:
            with self.waiting(Call(call, transport)):
                yield
        finally:
            with self._state:
                self._users -= 1
                self._state.notify_all()

    @contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Name the call in stall reports while the block runs, unless it is nested in another call."""
        outermost: Call | None = getattr(self._outermost, "call", None)
        if outermost is not None or not call.name:
            if outermost is not None and call.transport is not None and call.stalls:
                # The ranks are known now. A Horovod operation inside the call (`stalls=False`) does not determine them.
                outermost.transport = call.transport
            yield
            return
        self._outermost.call = call
        with self._state:
            self._calls.append(call)
        try:
            yield
        finally:
            self._outermost.call = None
            with self._state:
                self._calls.remove(call)

    def _after_fork(self) -> None:
        self._is_rank = self._job is None  # a forked copy of a rank is not a rank

    def background(self, name: str, call: str = "") -> Background:
        """Create a ``Background`` thread that ``close`` waits for. Takes the arguments of ``Background``."""
        self._close_at_exit()
        thread = Background(name, call)
        self._threads.add(thread)
        return thread

    def _close_at_exit(self) -> None:
        """Call ``close`` at exit before what was registered so far, such as Horovod's shutdown."""
        atexit.unregister(self.close)
        atexit.register(self.close)

    @property
    def background_calls(self) -> tuple[str, ...]:
        """Names of calls that this rank takes part in on background threads."""
        return tuple({thread.call for thread in self._threads if thread.call and thread.busy})

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function of another library, an attribute of ``owner``, by ``make(function)`` until ``close``.

        Does nothing if it is already replaced.
        """
        if (id(owner), name) not in self._replaced:
            original = getattr(owner, name)
            replacement = make(original)
            setattr(owner, name, replacement)
            self._replaced[id(owner), name] = (owner, original, replacement)

    def close(self) -> None:
        """Leave the job: notify the other ranks, complete work in progress, restore replaced functions.

        Front ends call this before they shut their library down. It also runs at program exit and in MPI_Finalize.
        Does nothing if there is nothing to close, as in a second call.

        Buckets that have started are still exchanged, because other ranks may be waiting for them. Ranks that wait for
        anything else end the job. So does this rank if an exception has abandoned a bucket that is still in exchange.
        """
        with self._state:
            if self._closing or not self._is_rank:
                return
            self._closing = True
        try:
            threads = list(self._threads)
            for thread in threads:
                if thread.abandoned and thread.busy:
                    self.abort(f"leaves the program; {thread.abandoned}")
            self.watch.say_farewell()
            for thread in threads:
                thread.close()
            join_ending()
            self.watch.close()
            for (_, name), (owner, original, replacement) in self._replaced.items():
                if getattr(owner, name) is replacement:
                    setattr(owner, name, original)
            self._replaced.clear()
            self.world = None
        finally:
            self._closing = False

    def abort_on_error(self) -> None:
        """Install exception hooks that end all ranks after an uncaught exception has been printed.

        Otherwise the other ranks would wait for this one. Exceptions in daemon threads are only printed: these threads
        are helpers, and Python does not wait for them either.
        """

        def of_program(previous: Any) -> Any:
            def report(kind: type[BaseException], *details: Any) -> None:
                previous(kind, *details)
                self._abort_because_of(kind)

            return report

        def of_thread(previous: Any) -> Any:
            def report(arguments: threading.ExceptHookArgs) -> None:
                previous(arguments)
                thread, kind = arguments.thread, arguments.exc_type
                if thread is not None and not thread.daemon and not issubclass(kind, SystemExit):
                    self._abort_because_of(kind, f", in thread {thread.name}")

            return report

        self.replace(sys, "excepthook", of_program)
        self.replace(threading, "excepthook", of_thread)

    def _abort_because_of(self, kind: type[BaseException], where: str = "") -> None:
        if self._is_rank:
            left = ""
            with suppress(FinalizedError), self.communicating():
                left = self.watch.who_left(patience=0.5)
            self.abort(f"ends all ranks because of the {kind.__name__} above{where}{left and f'; {left}'}")

    def abort(self, reason: str) -> None:
        """Print the reason on standard error, and end all ranks."""
        # A single write, as other ranks may be writing at the same time.
        sys.stderr.write(f"rank {self.job.rank}: {reason}\n")
        sys.stderr.flush()
        try:
            with self.communicating():
                self.job.abort()
        except FinalizedError:
            os._exit(1)  # the launcher ends the other ranks when it sees this status


process = Lifecycle()
