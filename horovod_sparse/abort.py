"""A rank that fails or leaves early ends the job instead of letting the others wait for it."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from types import TracebackType

from mpi4py import MPI

# Of the message by which a rank says that it leaves; the collectives' messages have lower tags.
_LEAVES = 32767  # the largest tag that every MPI allows
# Seconds that a rank which leaves stays for the others: they look for it once a second.
_STAY = 5.0


@functools.cache
def abort_on_error() -> None:
    """Lets an uncaught exception of the main thread end all ranks, after it was printed.

    Without it Python would wait at exit for the thread that exchanges, which waits for the other ranks, which wait
    for this one. A handler that was installed before is called first.
    """
    previous = sys.excepthook

    def report_and_abort(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        previous(kind, error, traceback)
        _abort(f"ends all ranks because of the {kind.__name__} above")

    sys.excepthook = report_and_abort


class Watch:
    """Notices when a rank leaves the program while another still waits for it.

    Horovod's own exchange fails on all ranks when one of them shuts Horovod down; MPI's collectives would wait, or
    crash: Horovod's shutdown on one rank finalizes MPI on every rank. So a rank says that it leaves and then stays a
    while, until all others leave as well or have had the time to name it.

    Args:
        comm: The communicator of the ranks that exchange.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._process = os.getpid()
        atexit.register(self._leave)  # runs before Horovod's shutdown, which was registered earlier

    def _leave(self) -> None:
        forked = os.getpid() != self._process  # a copy of this process, which is no rank of its own
        if not forked and not MPI.Is_finalized():
            others = set(range(self._comm.Get_size())) - {self._comm.Get_rank()}
            for rank in others:
                self._comm.Send([None, 0, MPI.BYTE], rank, _LEAVES)  # empty messages are sent without waiting
            status, deadline = MPI.Status(), time.monotonic() + _STAY
            while others and time.monotonic() < deadline:
                if self._comm.Iprobe(MPI.ANY_SOURCE, _LEAVES, status):
                    others.discard(status.Get_source())
                    self._comm.Recv([None, 0, MPI.BYTE], status.Get_source(), _LEAVES)
                else:
                    time.sleep(0.01)

    def check(self, bucket: int) -> None:
        """Ends all ranks when one of them has left; called from time to time while this rank waits for a bucket."""
        status = MPI.Status()
        if self._comm.Iprobe(MPI.ANY_SOURCE, _LEAVES, status):
            gone, size = status.Get_source(), self._comm.Get_size()
            _abort(
                f"rank {gone} of {size} has left the program, but bucket {bucket} waits for it: let every rank take as "
                "many steps (equal shares of the data, drop_last=True)"
            )


def _abort(reason: str) -> None:
    print(f"rank {MPI.COMM_WORLD.Get_rank()}: {reason}", file=sys.stderr, flush=True)
    MPI.COMM_WORLD.Abort(1)
