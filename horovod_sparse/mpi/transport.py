"""Ways of arrays to MPI and back: the only place that knows which memory MPI can read and write.

NumPy arrays are given to MPI as they are, and so are CuPy arrays where MPI is CUDA-aware. Everywhere else CuPy arrays
go through pinned memory of the host. How a rank does it is its own affair as long as messages go from one rank to
another; for the MPI library's collectives all ranks must do it alike.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from horovod_sparse.kernels.types import Array
from horovod_sparse.mpi.cudaaware import cuda_aware

if TYPE_CHECKING:
    from horovod_sparse.mpi.pinned import Pool

PIECE_BYTES = 1 << 22  # of a sum, which is staged piece by piece


class Parcel(Protocol):
    """A message, as MPI sees it."""

    @property
    def buffer(self) -> Array:
        """The array that MPI reads or writes."""
        ...

    def unload(self) -> Array:
        """The message that has arrived in the buffer, on the device where it is wanted."""
        ...

    def release(self) -> None:
        """Ends the use of the buffer; what ``unload`` gave stays valid."""
        ...


class _Itself(NamedTuple):
    """A message that MPI takes as it is."""

    buffer: Array

    def unload(self) -> Array:
        return self.buffer

    def release(self) -> None:
        pass


class Way(Protocol):
    """A way to MPI."""

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Parcel]:
        """Makes messages (uint8 arrays) ready to be sent."""
        ...

    def incoming(self, nbytes: int, like: Array) -> Parcel:
        """Makes room for a message that shall arrive on the device of ``like``."""
        ...

    def sum(self, comm: MPI.Intracomm, values: Array, total: Array) -> None:
        """Sums an array over the ranks into another one; a collective call."""
        ...


class Direct:
    """NumPy arrays, which MPI takes as they are."""

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Parcel]:
        """The messages themselves, one after the other: the first may leave before the last is made."""
        return map(_Itself, messages)

    def incoming(self, nbytes: int, like: Array) -> Parcel:
        """A new array."""
        return _Itself(np.empty(nbytes, np.uint8, like=like))

    def sum(self, comm: MPI.Intracomm, values: Array, total: Array) -> None:
        """MPI Allreduce."""
        comm.Allreduce(values, total)


class Aware(Direct):
    """CuPy arrays, which a CUDA-aware MPI takes as they are, once the device has done what it was told.

    MPI knows nothing of the current stream. Even what it shall only write must be waited for: a new array's memory may
    have been another one's, which work that is still to be done reads.
    """

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Parcel]:
        """The messages themselves; all of them are waited for at once."""
        parcels = list(super().outgoing(messages))
        _settle()
        return parcels

    def incoming(self, nbytes: int, like: Array) -> Parcel:
        """A new array of the device."""
        parcel = super().incoming(nbytes, like)
        _settle()
        return parcel

    def sum(self, comm: MPI.Intracomm, values: Array, total: Array) -> None:
        """MPI Allreduce."""
        _settle()
        super().sum(comm, values, total)


class Staged:
    """CuPy arrays by way of pinned memory.

    Messages have blocks of their own, until MPI and the device are done with them. Copies take their turn on the
    current stream.
    """

    def __init__(self) -> None:
        # Loaded where there is CuPy.
        self._pool: Callable[[], Pool] = importlib.import_module("horovod_sparse.mpi.pinned").pool

    def outgoing(self, messages: Iterable[Array]) -> Iterable[Parcel]:
        """Copies of the messages; all of them are waited for at once."""
        parcels = [self._load(message) for message in messages]
        if parcels:
            parcels[-1].block.wait()  # and thereby for those before it
        return parcels

    def _load(self, message: Array) -> _StagedParcel:
        parcel = _StagedParcel(self._pool(), message.nbytes)
        parcel.block.load(message)
        return parcel

    def incoming(self, nbytes: int, like: Array) -> Parcel:
        """A block, which ``unload`` copies to the device."""
        return _StagedParcel(self._pool(), nbytes, like)

    def sum(self, comm: MPI.Intracomm, values: Array, total: Array) -> None:
        """MPI Allreduce of pieces: while one is summed, the device copies its neighbours."""
        length, pool = PIECE_BYTES // values.itemsize, self._pool()
        pieces = [slice(start, start + length) for start in range(0, values.size, length)]
        blocks = [pool.lend(min(values.nbytes, PIECE_BYTES)) for _ in pieces[:2]]
        if pieces:
            blocks[0].load(values[pieces[0]])
        for number, piece in enumerate(pieces):
            block, part = blocks[number % 2], total[piece]
            block.wait()
            if number + 1 < len(pieces):  # on the stream, behind the copy that empties the other block
                blocks[(number + 1) % 2].load(values[pieces[number + 1]])
            comm.Allreduce(MPI.IN_PLACE, block.view(part.nbytes, part.dtype))
            block.unload(part)
        for block in blocks:
            pool.give_back(block)


class _StagedParcel:
    """A message in pinned memory.

    Args:
        pool: Lends the memory.
        nbytes: Bytes of the message.
        like: Array on the device where the message is wanted; None: it leaves the device.
    """

    __slots__ = ("_like", "_pool", "block", "buffer")

    def __init__(self, pool: Pool, nbytes: int, like: Array | None = None) -> None:
        self._pool = pool
        self._like = like
        self.block = pool.lend(nbytes)
        self.buffer = self.block.view(nbytes)

    def unload(self) -> Array:
        message = np.empty(self.buffer.size, np.uint8, like=self._like)
        self.block.unload(message)
        return message

    def release(self) -> None:
        self._pool.give_back(self.block)


def _settle() -> None:
    """Waits for the current stream."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()


_DIRECT, _AWARE = Direct(), Aware()
_staged = functools.cache(Staged)  # made where there is CuPy


class Staging:
    """The ways of a communicator's ranks to MPI.

    Args:
        comm: The communicator.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._all_aware: bool | None = None  # unknown before there is an array of the device

    def own(self, like: Any) -> Way:
        """This rank's way, for messages from one rank to another.

        Raises:
            RuntimeError: The environment says that MPI is CUDA-aware, but it is not.
            ValueError: The environment says something unknown.
        """
        if isinstance(like, np.ndarray):
            return _DIRECT
        return _AWARE if cuda_aware() else _staged()

    def common(self, like: Any) -> Way:
        """The way of all ranks, for the MPI library's collectives; for the device, a collective call the first time.

        Raises:
            RuntimeError: As for ``own``.
            ValueError: As for ``own``.
        """
        if isinstance(like, np.ndarray):
            return _DIRECT
        own = self.own(like)
        if self._all_aware is None:
            self._all_aware = bool(self._comm.allreduce(int(own is _AWARE), MPI.MIN))
        return _AWARE if self._all_aware else _staged()
