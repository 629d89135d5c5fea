"""Messages between the ranks of one communicator, every byte counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives.exchange import Traffic
from horovod_sparse.collectives.wire import Wire
from horovod_sparse.kernels.types import Array
from horovod_sparse.network import RING_BYTES
from horovod_sparse.staging import Parcel, Staging

# MPI counts are C ints: a longer message would wrap around.
MPI_COUNT_MAX = 2**31 - 1
_ALIGNMENT = 8
_TAG = 1


class Sending:
    """A message that is leaving this rank, and must stay unchanged until then."""

    def __init__(self, request: MPI.Request, parcel: Parcel) -> None:
        self._request = request
        self._parcel = parcel

    def wait(self) -> None:
        """Waits until the message may change."""
        self._request.Wait()
        self._parcel.release()


class Receiving:
    """A message that is arriving."""

    def __init__(self, request: MPI.Request, parcel: Parcel) -> None:
        self._request = request
        self._parcel = parcel

    def wait(self) -> Array:
        """Waits until the message is there, and gives it. Once."""
        self._request.Wait()
        message = self._parcel.unload()
        self._parcel.release()
        return message


class Messenger:
    """Sends and receives messages (uint8 arrays) on a communicator, and counts them.

    Messages and sums may be of any device; what arrives is on the device of the array that stands by as an example.

    Args:
        comm: The communicator of the ranks that take part.
        wire: Format of the values in messages; None: as they are.

    Attributes:
        wire: Makes messages of entries, and entries of messages.

    Raises:
        ValueError: The format is unknown.
    """

    def __init__(self, comm: MPI.Intracomm, wire: str | None = None) -> None:
        self.comm = comm
        self.wire = Wire(wire)
        self.rank: int = comm.Get_rank()
        self.ranks: int = comm.Get_size()
        self.traffic = Traffic()
        self._staging = Staging(comm)

    def send(self, message: Array, rank: int) -> Sending:
        """Begins to send a message.

        Raises:
            RuntimeError: The message is longer than MPI can count.
        """
        return self.send_all([message], [rank], message)[0]

    def send_all(self, messages: Iterable[Array], ranks: Sequence[int], like: Array) -> list[Sending]:
        """Begins to send several messages; on a device, all of them are waited for at once.

        Args:
            messages: One for each of the ranks.
            ranks: Where they go.
            like: Array on the messages' device.

        Raises:
            RuntimeError: A message is longer than MPI can count.
        """
        parcels = self._staging.own(like).outgoing(messages)
        return [self._send(parcel, rank) for parcel, rank in zip(parcels, ranks, strict=True)]

    def _send(self, parcel: Parcel, rank: int) -> Sending:
        self._check_length(parcel.buffer.nbytes)
        self.traffic.send(parcel.buffer.nbytes)
        return Sending(self.comm.Isend([parcel.buffer, MPI.BYTE], rank, _TAG), parcel)

    def receive(self, rank: int, like: Array) -> Receiving:
        """Waits until a message of a rank is announced, of whatever length, and begins to receive it.

        Args:
            rank: Where it comes from.
            like: Array on the device where the message is wanted.
        """
        status = MPI.Status()
        announced = self.comm.Mprobe(rank, _TAG, status)
        parcel = self._staging.own(like).incoming(status.Get_count(MPI.BYTE), like)
        self.traffic.receive(parcel.buffer.nbytes)
        return Receiving(announced.Irecv([parcel.buffer, MPI.BYTE]), parcel)

    def share(self, *numbers: int) -> Array:
        """Tells all ranks some numbers; returns int64 [ranks, len(numbers)]."""
        mine = np.array(numbers, np.int64)
        everyones = np.empty((self.ranks, mine.size), np.int64)
        self.comm.Allgather(mine, everyones)
        others = self.ranks - 1
        self.traffic.send(others * mine.nbytes, others.bit_length())
        self.traffic.receive(others * mine.nbytes, others.bit_length())
        return everyones

    def sum(self, values: Array) -> Array:
        """Sums an array over the ranks (MPI Allreduce), the same bits on every rank; returns a new array."""
        if self.ranks == 1:
            alone: Array = values.copy()
            return alone
        total = np.empty_like(values)
        self._staging.common(values).sum(self.comm, values, total)
        others = self.ranks - 1
        messages = 2 * others if values.nbytes >= RING_BYTES else 2 * others.bit_length()
        self.traffic.send(2 * values.nbytes * others / self.ranks, messages)
        self.traffic.receive(2 * values.nbytes * others / self.ranks, messages)
        return total

    def allgather(self, message: Array, lengths: Sequence[int]) -> list[Array]:
        """Every rank's message, in rank order; this rank's own may be the array given.

        From RING_BYTES on, messages travel around a ring of our own: on Ethernet it takes 30 % less time than the
        algorithm that Open MPI chooses, and every byte is counted. Below, latency decides, and MPI knows better.

        Args:
            message: This rank's message.
            lengths: Bytes of every rank's message.

        Raises:
            RuntimeError: A message is longer than MPI can count. Raised on every rank alike.
        """
        self._check_length(max(lengths))
        if self.ranks == 1:
            return [message]
        return (self._ring if sum(lengths) >= RING_BYTES else self._allgatherv)(message, lengths)

    def _ring(self, message: Array, lengths: Sequence[int]) -> list[Array]:
        """In each step every rank passes on to its right what it got from its left: P-1 messages."""
        way = self._staging.own(message)
        (own,) = way.outgoing([message])
        parcels, messages = [own] * self.ranks, [message] * self.ranks
        right, left = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        for step in range(self.ranks - 1):
            outgoing, incoming = (self.rank - step) % self.ranks, (left - step) % self.ranks
            parcels[incoming] = way.incoming(lengths[incoming], message)
            self.comm.Sendrecv(parcels[outgoing].buffer, right, _TAG, parcels[incoming].buffer, left, _TAG)
            messages[incoming] = parcels[incoming].unload()
            self.traffic.send(lengths[outgoing])
            self.traffic.receive(lengths[incoming])
        for parcel in parcels:
            parcel.release()
        return messages

    def _allgatherv(self, message: Array, lengths: Sequence[int]) -> list[Array]:
        starts = np.cumsum([0, *(-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths)]).tolist()
        way = self._staging.common(message)
        (own,), gathered = way.outgoing([message]), way.incoming(starts[-1], message)
        self.comm.Allgatherv(own.buffer, (gathered.buffer, (lengths, starts[:-1])))
        everyones = gathered.unload()
        own.release()
        gathered.release()
        others = self.ranks - 1
        # What a rank passes on depends on the algorithm; over all ranks as much is sent as is received.
        self.traffic.send(sum(lengths) * others / self.ranks, others.bit_length())
        self.traffic.receive(sum(lengths) - message.nbytes, others.bit_length())
        return [everyones[start : start + length] for start, length in zip(starts[:-1], lengths, strict=True)]

    def broadcast(self, message: Array, length: int) -> Array:
        """Rank 0's message, of ``length`` bytes, on every rank (MPI Bcast).

        Args:
            message: On rank 0, the message; elsewhere an array on the device where it is wanted.
            length: The same on every rank.

        Raises:
            RuntimeError: The message is longer than MPI can count. Raised on every rank alike.
        """
        self._check_length(length)
        if self.ranks == 1:
            return message
        way = self._staging.common(message)
        if self.rank == 0:
            (parcel,) = way.outgoing([message])
        else:
            parcel = way.incoming(length, message)
            self.traffic.receive(length)
        self.comm.Bcast(parcel.buffer)
        if self.rank > 0:
            message = parcel.unload()
        parcel.release()
        self.traffic.send(length * (self.ranks - 1) / self.ranks)
        return message

    def _check_length(self, nbytes: int) -> None:
        if nbytes > MPI_COUNT_MAX:
            raise RuntimeError(
                f"rank {self.rank} of {self.ranks}: a message of {nbytes} bytes is longer than MPI's limit of "
                f"{MPI_COUNT_MAX}: lower density or bucket_bytes"
            )
