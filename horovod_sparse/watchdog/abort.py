"""A rank that fails ends the job instead of letting the others wait for it."""

from __future__ import annotations

import functools
import os
import sys
import threading
from types import TracebackType

from mpi4py import MPI

from horovod_sparse.mpi.lifetime import inside_mpi


@functools.cache
def abort_on_error() -> None:
    """Lets an uncaught exception end all ranks, after it was printed: of the main thread, or of one that is no daemon.

    Without it Python would wait at exit for the thread that exchanges, which waits for the other ranks, which wait
    for this one. Daemons are helpers, which Python itself does not wait for. Handlers that were installed before are
    called first.
    """
    rank_in_world()
    previous, previous_of_threads = sys.excepthook, threading.excepthook

    def report_and_abort(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        previous(kind, error, traceback)
        abort(f"ends all ranks because of the {kind.__name__} above")

    def of_thread(arguments: threading.ExceptHookArgs) -> None:
        previous_of_threads(arguments)
        thread = arguments.thread
        if thread is not None and not thread.daemon and not issubclass(arguments.exc_type, SystemExit):
            abort(f"ends all ranks because of the {arguments.exc_type.__name__} above, in thread {thread.name}")

    sys.excepthook, threading.excepthook = report_and_abort, of_thread


@functools.cache
def rank_in_world() -> int:
    """This process' rank, asked for while MPI can still tell."""
    return MPI.COMM_WORLD.Get_rank()


def abort(reason: str) -> None:
    """Ends all ranks, after saying why on the standard error stream."""
    # In one piece, as other ranks may be writing the same.
    sys.stderr.write(f"rank {rank_in_world()}: {reason}\n")
    sys.stderr.flush()
    try:
        with inside_mpi():
            MPI.COMM_WORLD.Abort(1)
    except RuntimeError:
        os._exit(1)  # MPI is finalized: the launcher ends the other ranks when it sees this status
