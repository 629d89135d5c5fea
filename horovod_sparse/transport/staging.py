"""Host copies of device arrays, for libraries that cannot read or write the memory of a GPU.

NumPy arrays are sent in place, and so are CuPy arrays where MPI is CUDA-aware. Elsewhere CuPy arrays pass through
pinned host memory. Ranks may differ in this as long as messages go from one rank to another; in collective operations
of the MPI library all ranks must do the same.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from horovod_sparse.kernels.types import Array
from horovod_sparse.transport.cuda_aware import cuda_aware

if TYPE_CHECKING:
    from horovod_sparse.transport.pinned import Block, Pool


class Buffer(Protocol):
    """Memory that the library reads a message from, or writes it to.

    Attributes:
        array: The memory (uint8).
    """

    @property
    def array(self) -> Array:
        """The memory (uint8)."""

    def close(self) -> None:
        """End the use of the buffer: a received message is then in the array that it was meant for."""


class _InPlace(NamedTuple):
    """The message itself."""

    array: Array

    def close(self) -> None:
        pass


class Path(Protocol):
    """Provides buffers for messages."""

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Buffer]:
        """Return buffers that hold messages to be sent."""

    def incoming(self, targets: Iterable[Array]) -> Iterable[Buffer]:
        """Return buffers for messages that shall arrive in arrays."""


class InPlace:
    """Host arrays are their own buffers."""

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Buffer]:
        """Return the messages one at a time: the first may be sent before the last exists."""
        return map(_InPlace, messages)

    def incoming(self, targets: Iterable[Array]) -> Iterable[Buffer]:
        """Return the targets."""
        return map(_InPlace, targets)


class CudaAware(InPlace):
    """Device arrays are their own buffers, once the device has completed its work on them.

    MPI does not know of CUDA streams. Targets must be waited for, too: a new array may reuse the memory of another one
    that kernels still read.
    """

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Buffer]:
        """Return the messages, after waiting for all of them at once."""
        buffers = list(super().outgoing(messages))
        _synchronize()
        return buffers

    def incoming(self, targets: Iterable[Array]) -> Iterable[Buffer]:
        """Return the targets, after waiting for all of them at once."""
        buffers = list(super().incoming(targets))
        _synchronize()
        return buffers


class Staged:
    """Device arrays are copied to and from pinned host memory, on the current stream."""

    def __init__(self) -> None:
        # Imported where there is CuPy.
        self._pool: Callable[[], Pool] = importlib.import_module("horovod_sparse.transport.pinned").pool

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Buffer]:
        """Return copies of the messages, after waiting for all of them at once."""
        buffers = []
        for message in messages:
            buffer = _Staged(self._pool(), message)
            buffer.block.load(message)
            buffers.append(buffer)
        if buffers:
            buffers[-1].block.wait()  # and thereby for those before it on the stream
        return buffers

    def incoming(self, targets: Iterable[Array]) -> Iterable[Buffer]:
        """Return host buffers, each of which ``close`` copies to its target."""
        return [_Staged(self._pool(), target, arrives=True) for target in targets]


class _Staged:
    """Pinned memory for a message.

    Args:
        pool: Lends the memory.
        message: Array on the device.
        arrives: Whether ``close`` copies to the array.
    """

    __slots__ = ("_arrives", "_message", "_pool", "array", "block")

    def __init__(self, pool: Pool, message: Array, *, arrives: bool = False) -> None:
        self._pool = pool
        self._message = message
        self._arrives = arrives
        self.block: Block = pool.lend(message.nbytes)
        self.array = self.block.view(message.nbytes)

    def close(self) -> None:
        if self._arrives:
            self.block.unload(self._message)
        self._pool.give_back(self.block)


def _synchronize() -> None:
    """Wait for the current stream."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()


IN_PLACE, CUDA_AWARE = InPlace(), CudaAware()
_staged = functools.cache(Staged)  # made where there is CuPy


def path_for(like: Any) -> Path:
    """Return this rank's path for arrays on the device of an array.

    Raises:
        RuntimeError: The environment says that MPI is CUDA-aware, but it is not.
        ValueError: The environment variable has an unknown value.
    """
    if isinstance(like, np.ndarray):
        return IN_PLACE
    return CUDA_AWARE if cuda_aware() else staged()


def staged() -> Path:
    """Return the path through pinned host memory."""
    return _staged()
