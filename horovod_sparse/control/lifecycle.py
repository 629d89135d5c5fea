"""The process as one rank of a job: its threads, its use of MPI, and how it leaves or ends the job.

``process`` holds everything that belongs to the process rather than to one optimizer.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from types import TracebackType
from typing import Any

from mpi4py import MPI

from horovod_sparse.control.background import Background
from horovod_sparse.control.watch import ADVICE, Call, FinalizedError, Watch

_HOROVOD_SHUT_DOWN = "Horovod has been shut down, here or by a rank that has left the program"


class Lifecycle:
    """Threads, functions replaced in other libraries, use of MPI, and shutdown of one process.

    Attributes:
        world: Private communicator of all ranks; None until all of them have made something together.
        watch: Exchanges farewells and progress reports with the other ranks.
    """

    def __init__(self) -> None:
        self.world: MPI.Intracomm | None = None
        self.watch = Watch(self)
        self._state = threading.Condition()  # guards the next five
        self._users = 0  # blocks that use MPI
        self._finalized = ""  # why MPI can no longer be used
        self._calls: list[Call] = []
        self._closing = False
        self._attached = False
        self._outermost = threading.local()  # call of each thread
        self._threads: weakref.WeakSet[Background] = weakref.WeakSet()
        self._replaced: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        self._is_rank = True
        os.register_at_fork(after_in_child=self._after_fork)

    @cached_property
    def rank(self) -> int:
        """Rank in ``MPI.COMM_WORLD``."""
        return MPI.COMM_WORLD.Get_rank()

    @property
    def calls(self) -> list[Call]:
        """Calls in which the program waits for other ranks."""
        with self._state:
            return list(self._calls)

    @contextmanager
    def inside_mpi(self, call: str = "", comm: MPI.Intracomm | None = None) -> Iterator[None]:
        """Delay MPI_Finalize until the block ends.

        When one rank shuts Horovod down, Horovod's background threads finalize MPI on all ranks, whatever other threads
        are doing: a thread in the middle of an exchange would crash.

        Args:
            call: Public function in which ranks wait for each other, for reports; empty: no such call. Of nested calls,
                reports name the outermost.
            comm: Communicator of the ranks that the call waits for; None: not known yet.

        Raises:
            FinalizedError: MPI has been finalized.
        """
        with self._state:
            if self._finalized or MPI.Is_finalized():
                raise FinalizedError(f"nothing can be exchanged: {self._finalized or _HOROVOD_SHUT_DOWN}: {ADVICE}")
            self._attach()
            self._users += 1
        try:
            with self.waiting(Call(call, comm)):
                yield
        finally:
            with self._state:
                self._users -= 1
                self._state.notify_all()

    @contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Let reports say that the program waits in a call during the block."""
        outermost: Call | None = getattr(self._outermost, "call", None)
        if outermost is not None or not call.name:
            if outermost is not None and call.comm is not None and call.stalls:
                outermost.comm = call.comm  # known by now; Horovod's operations inside of our calls tell nothing
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

    def _attach(self) -> None:
        """Register ``close`` at exit and with MPI_Finalize, which begins by deleting attributes of COMM_SELF; once."""
        if self._attached:
            return
        self._attached = True
        atexit.register(self.close)  # before Horovod's shutdown, which was registered earlier

        def before_finalize(*_: Any) -> None:
            # On any other thread, it is Horovod that finalizes MPI, usually because another rank has asked for it.
            if threading.current_thread() is threading.main_thread():
                self.close()
            with self._state:
                self._state.wait_for(lambda: self._users == 0)
                self._finalized = _HOROVOD_SHUT_DOWN
            self._finalized = self.watch.who_left() or _HOROVOD_SHUT_DOWN

        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=before_finalize), "horovod_sparse uses MPI")

    def _after_fork(self) -> None:
        self._is_rank = not self._attached  # a copy of a process that uses MPI is no rank of its own

    def background(self, name: str, call: str = "") -> Background:
        """Make a background thread that ``close`` waits for; arguments as of ``Background``."""
        thread = Background(name, call)
        self._threads.add(thread)
        return thread

    @property
    def background_calls(self) -> tuple[str, ...]:
        """Names of calls that this rank takes part in on background threads."""
        return tuple({thread.call for thread in self._threads if thread.call and thread.busy})

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function of another library until ``close``; does nothing where that has been done.

        Args:
            owner: Module, class or object that has it.
            name: Attribute.
            make: Makes the replacement of the original.
        """
        if (id(owner), name) not in self._replaced:
            original = getattr(owner, name)
            replacement = make(original)
            setattr(owner, name, replacement)
            self._replaced[id(owner), name] = (owner, original, replacement)

    def close(self) -> None:
        """Leave the job: tell the other ranks, complete what is in progress, give back replaced functions.

        Front ends call it before they shut their library down; so do the end of the program and MPI_Finalize. Does
        nothing in a second call, or where there is nothing to end.

        Buckets that have started are still exchanged: other ranks may be waiting for them. Other ranks that wait for
        anything else end the job. So does this rank, if an exception has abandoned a bucket that is still in exchange.
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
            self.watch.close()
            for (_, name), (owner, original, replacement) in self._replaced.items():
                if getattr(owner, name) is replacement:
                    setattr(owner, name, original)
            self._replaced.clear()
            self.world = None
        finally:
            self._closing = False

    def abort_on_error(self) -> None:
        """End all ranks after an uncaught exception, once it is printed: in the main thread, or one that is no daemon.

        The other ranks would wait for this one. Daemon threads are helpers, which Python does not wait for either.
        """
        self.rank  # noqa: B018 - while MPI can tell

        def of_program(previous: Any) -> Any:
            def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
                previous(kind, error, traceback)
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
            with suppress(FinalizedError), self.inside_mpi():
                left = self.watch.who_left()
            self.abort(f"ends all ranks because of the {kind.__name__} above{where}{left and f'; {left}'}")

    def abort(self, reason: str) -> None:
        """End all ranks, after printing why on the standard error stream."""
        # In one piece, as other ranks may be writing the same.
        sys.stderr.write(f"rank {self.rank}: {reason}\n")
        sys.stderr.flush()
        try:
            with self.inside_mpi():
                MPI.COMM_WORLD.Abort(1)
        except FinalizedError:
            os._exit(1)  # MPI is finalized: the launcher ends the other ranks when it sees this status


process = Lifecycle()
