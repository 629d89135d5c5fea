"""A rank that fails ends the job instead of letting the others wait for it."""

from __future__ import annotations

import functools
import os
import sys
from types import TracebackType

from mpi4py import MPI

from horovod_sparse.mpi.lifetime import inside_mpi


@functools.cache
def abort_on_error() -> None:
    """Lets an uncaught exception of the main thread end all ranks, after it was printed.

    Without it Python would wait at exit for the thread that exchanges, which waits for the other ranks, which wait
    for this one. A handler that was installed before is called first.
    """
    rank_in_world()
    previous = sys.excepthook

    def report_and_abort(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        previous(kind, error, traceback)
        abort(f"ends all ranks because of the {kind.__name__} above")

    sys.excepthook = report_and_abort


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
