"""A rank that fails or leaves early ends the job instead of letting the others wait for it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from types import TracebackType

from mpi4py import MPI

from horovod_sparse.inside import inside_mpi

# Of the message by which a rank says that it leaves; the collectives' messages have lower tags.
_LEAVES = 32767  # the largest tag that every MPI allows


@functools.cache
def abort_on_error() -> None:
    """Lets an uncaught exception of the main thread end all ranks, after it was printed.

    Without it Python would wait at exit for the thread that exchanges, which waits for the other ranks, which wait
    for this one. A handler that was installed before is called first.
    """
    _rank()
    previous = sys.excepthook

    def report_and_abort(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        previous(kind, error, traceback)
        _abort(f"ends all ranks because of the {kind.__name__} above")

    sys.excepthook = report_and_abort


class Watch:
    """Notices when a rank leaves the program while another still waits for it.

    Horovod's own exchange fails on all ranks when one of them shuts Horovod down; MPI's collectives would wait.

    Args:
        comm: The communicator of the ranks that exchange.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._process = os.getpid()
        _rank()
        atexit.register(self._leave)  # runs before Horovod's shutdown, which was registered earlier

    def _leave(self) -> None:
        forked = os.getpid() != self._process  # a copy of this process, which is no rank of its own
        if forked:
            return
        with contextlib.suppress(RuntimeError), inside_mpi():  # nobody to tell where MPI is finalized already
            for rank in set(range(self._comm.Get_size())) - {self._comm.Get_rank()}:
                self._comm.Send([None, 0, MPI.BYTE], rank, _LEAVES)  # empty messages are sent without waiting

    def check(self, bucket: int) -> None:
        """Ends all ranks when one of them has left; called from time to time while this rank waits for a bucket."""
        status = MPI.Status()
        with inside_mpi():
            left = self._comm.Iprobe(MPI.ANY_SOURCE, _LEAVES, status)
        if left:
            gone, size = status.Get_source(), self._comm.Get_size()
            _abort(
                f"rank {gone} of {size} has left the program, but bucket {bucket} waits for it: let every rank take as "
                "many steps (equal shares of the data, drop_last=True)"
            )


@functools.cache
def _rank() -> int:
    """This process' rank, asked for while MPI can still tell."""
    return MPI.COMM_WORLD.Get_rank()


def _abort(reason: str) -> None:
    print(f"rank {_rank()}: {reason}", file=sys.stderr, flush=True)
    try:
        with inside_mpi():
            MPI.COMM_WORLD.Abort(1)
    except RuntimeError:
        os._exit(1)  # MPI is finalized: the launcher ends the other ranks when it sees this status
