"""Preemption notice: signals that schedulers send before they stop or preempt a job."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.control.lifecycle import process
from horovod_sparse.frontends.members import job, transport_of
from horovod_sparse.transport.base import Transport


@contextmanager
def noticing() -> Iterator[NDArray[np.int32]]:
    """Treat SIGUSR1 and SIGTERM as notice inside the block; yield an int32 array of shape (1,), 1 after a signal.

    The previous signal handlers are restored when the block ends.

    Raises:
        ValueError: The block is entered outside the main thread, where Python does not allow signal handlers.
    """
    noticed = np.zeros(1, np.int32)

    def notice(*_: Any) -> None:
        noticed[0] = 1

    previous = {number: signal.signal(number, notice) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        yield noticed
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def on_preemption(process_set: Any = None) -> Iterator[Callable[[], bool]]:
    """Treat SIGUSR1 and SIGTERM as preemption notice inside the block, instead of letting them end the process.

    SLURM sends SIGUSR1 if a job requests it (``--signal``), and SIGTERM before it kills a job. Work in progress, such
    as a save, is completed. The block may be entered before ``hvd.init()``. The previous signal handlers are restored
    when the block ends.

    Args:
        process_set: Ranks that share the notice: a Horovod process set, a torch process group or an MPI communicator;
            by default all ranks.

    Yields:
        A function that returns True once any of the ranks has received a signal. It is a collective call (four bytes):
        all ranks call it once per step, and get the same result.

    Raises:
        ValueError: The block is entered outside the main thread, where Python does not allow signal handlers.
    """
    transport: Transport | None = None
    with noticing() as noticed:

        def preempted() -> bool:
            nonlocal transport
            transport = transport or transport_of(process_set)
            if transport is None:
                raise ValueError(f"rank {job().rank} is not part of {process_set}: call preempted() on its ranks only")
            with process.communicating("preempted()", transport):
                ranks = transport.allreduce(noticed)
            return bool(ranks[0])

        yield preempted
