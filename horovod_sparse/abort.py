"""A rank that fails ends the job instead of leaving the others waiting."""

from __future__ import annotations

import functools
import sys
from types import TracebackType

from mpi4py import MPI


@functools.cache
def abort_on_error() -> None:
    """Lets an uncaught exception of the main thread end all ranks, after it was printed.

    Without it Python would wait at exit for the thread that exchanges, which waits for the other ranks, which wait
    for this one. A handler that was installed before is called first.
    """
    previous = sys.excepthook

    def report_and_abort(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        previous(kind, error, traceback)
        rank = MPI.COMM_WORLD.Get_rank()
        print(f"rank {rank}: ends all ranks because of the {kind.__name__} above", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = report_and_abort
