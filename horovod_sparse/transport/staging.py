"""Staging buffers: host copies of device arrays, for MPI libraries that cannot access GPU memory.

NumPy arrays are sent in place, and so are CuPy arrays if MPI is CUDA-aware. Otherwise CuPy arrays are copied through
pinned host memory. Ranks may differ in this for point-to-point messages. In collectives of the MPI library, all ranks
must do the same.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_sparse.kernels.types import Array
from horovod_sparse.transport.cuda_aware import cuda_aware

if TYPE_CHECKING:
    from horovod_sparse.transport.pinned import Block, Pool


class Buffer:
    """Memory that MPI reads a message from, or writes it to: the message itself.

    Attributes:
        array: Memory of the buffer (uint8).
    """

    def __init__(self, array: Array) -> None:
        self.array = array

    def close(self) -> None:
        """Release the buffer, after copying a received message to its target on the current stream."""


class Path:
    """Path of arrays to and from MPI: provides the buffers of messages. This one uses host arrays as buffers."""

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Buffer]:
        """Return buffers that hold the messages, lazily: the first may be sent before the last exists."""
        return map(Buffer, messages)

    def incoming(self, targets: Iterable[Array]) -> Iterable[Buffer]:
        """Return buffers that receive messages for the targets."""
        return map(Buffer, targets)


class CudaAware(Path):
    """Path that uses device arrays as buffers, after synchronizing the current stream.

    MPI ignores CUDA streams. Targets need the synchronization, too: a new array may reuse memory that kernels of a
    freed array still read.
    """

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Buffer]:
        """Return the messages, after one synchronization for all of them."""
        import cupy

        buffers = list(super().outgoing(messages))
        cupy.cuda.get_current_stream().synchronize()
        return buffers

    def incoming(self, targets: Iterable[Array]) -> Iterable[Buffer]:
        """Return the targets, after one synchronization for all of them."""
        return self.outgoing(targets)


class Staged(Path):
    """Path that copies device arrays to and from pinned host memory, on the current stream."""

    def __init__(self) -> None:
        # Imported late, as it needs CuPy.
        self._pool: Callable[[], Pool] = importlib.import_module("horovod_sparse.transport.pinned").pool

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Buffer]:
        """Return host copies of the messages, after one synchronization for all of them."""
        buffers = []
        for message in messages:
            buffer = _Staged(self._pool(), message)
            buffer.block.load(message)
            buffers.append(buffer)
        if buffers:
            buffers[-1].block.wait()  # and thus for all earlier copies on the stream
        return buffers

    def incoming(self, targets: Iterable[Array]) -> Iterable[Buffer]:
        """Return host buffers; ``close`` copies each to its target."""
        return [_Staged(self._pool(), target, arrives=True) for target in targets]


class _Staged(Buffer):
    """Staging buffer in pinned memory.

    Args:
        pool: Pool that the memory is taken from and returned to.
        message: Array on the device.
        arrives: Whether the message is received: ``close`` then copies it to the array.
    """

    def __init__(self, pool: Pool, message: Array, *, arrives: bool = False) -> None:
        self._pool = pool
        self._message = message
        self._arrives = arrives
        self.block: Block = pool.lend(message.nbytes)
        super().__init__(self.block.view(message.nbytes))

    def close(self) -> None:
        if self._arrives:
            self.block.unload(self._message)
        self._pool.give_back(self.block)


IN_PLACE, CUDA_AWARE = Path(), CudaAware()


def path_for(like: Any) -> Path:
    """Return this rank's path for arrays on the device of ``like``.

    Raises:
        RuntimeError: HOROVOD_SPARSE_CUDA_AWARE is 1, but MPI is not CUDA-aware.
        ValueError: HOROVOD_SPARSE_CUDA_AWARE has an unknown value.
    """
    if isinstance(like, np.ndarray):
        return IN_PLACE
    return CUDA_AWARE if cuda_aware() else staged()


@functools.cache
def staged() -> Path:
    """Return the path through pinned host memory; the first call needs CuPy."""
    return Staged()
