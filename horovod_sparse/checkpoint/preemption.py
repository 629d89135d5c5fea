"""Notice of the end: signals that schedulers send before they stop or preempt a job."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from horovod_sparse.control.lifecycle import process
from horovod_sparse.frontends.members import transport_of
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.mpi import job


@contextmanager
def on_preemption(process_set: Any = None) -> Iterator[Callable[[], bool]]:
    """SIGUSR1 and SIGTERM no longer end this process inside the block, but are taken for notice of the end.

    SLURM sends SIGUSR1 where a job asks for it (``--signal``), and SIGTERM before it ends a job by force. What is being
    done, such as a save, is completed. The block may be entered before ``hvd.init()``. When it is left, the signals
    have their former effect again.

    Args:
        process_set: The ranks that ask together: a Horovod process set, a torch process group or an MPI communicator;
            by default all.

    Yields:
        A function that tells whether any of the ranks has had notice so far. A collective call, four bytes: all ranks
        call it as often, once a step, and get the same answer.

    Raises:
        ValueError: Entered outside the main thread, where Python allows no signal handlers.
    """
    noticed = np.zeros(1, np.int32)
    transport: Transport | None = None

    def notice(*_: Any) -> None:
        noticed[0] = 1

    def preempted() -> bool:
        nonlocal transport
        transport = transport or transport_of(process_set)
        if transport is None:
            raise ValueError(f"rank {job().rank} is not part of {process_set}: call preempted() on its ranks only")
        with process.communicating("preempted()", transport):
            ranks = transport.allreduce(noticed)
        return bool(ranks[0])

    previous = {number: signal.signal(number, notice) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        yield preempted
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
