"""Tests whose ranks torchrun has started, over ``TorchTransport``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport


def launched() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Comm:
    """The methods of an MPI communicator that tests of front ends call, over a transport.

    Args:
        transport: Transport of the ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.Get_rank = lambda: transport.rank
        self.Get_size = lambda: transport.size
        self.Barrier = transport.barrier
        self.allgather = transport.allgather_object
        self.bcast = transport.broadcast_object

    def allreduce(self, value: Any) -> Any:
        """Return the sum of numbers or arrays over the ranks."""
        return sum(self.allgather(value))

    def Split(self, color: int) -> Comm:  # noqa: N802 - as in MPI
        """Return a communicator of the ranks with the same color."""
        from horovod_sparse.transport.torch_distributed import TorchTransport

        colors = self.allgather(color)
        return Comm(TorchTransport.of([rank for rank, one in enumerate(colors) if one == color]).connect())
