"""Messages between the ranks of one communicator, every byte counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from horovod_sparse.kernels.types import Array
from horovod_sparse.mpi.kept import kept
from horovod_sparse.mpi.nodes import split_by_node
from horovod_sparse.mpi.traffic import RING_BYTES, Traffic
from horovod_sparse.mpi.transport import Parcel, Staging, Way

# MPI counts are C ints: a longer message would wrap around.
MPI_COUNT_MAX = 2**31 - 1
_ALIGNMENT = 8
# Bytes of a piece, of which several are under way. What Open MPI's TCP asks for before it sends it, from 64 KiB on,
# moves between two ranks in one direction at a time.
PIECE_BYTES = 60 << 10
# Of messages and first pieces, of the lengths of those that have several pieces, and of the other pieces.
_TAG, _LENGTH, _PIECE = 1, 3, 4


class Sending(NamedTuple):
    """A message that is leaving this rank, and must stay unchanged until then."""

    requests: list[MPI.Request]
    parcel: Parcel

    def wait(self) -> None:
        """Waits until the message may change."""
        MPI.Request.Waitall(self.requests)
        self.parcel.release()


class Receiving(NamedTuple):
    """A message that is arriving."""

    requests: list[MPI.Request]
    parcel: Parcel

    def wait(self) -> Array:
        """Waits until the message is there, and gives it. Once."""
        MPI.Request.Waitall(self.requests)
        message = self.parcel.unload()
        self.parcel.release()
        return message


class Messenger:
    """Sends and receives messages (uint8 arrays) on a communicator, and counts them.

    Messages and sums may be of any device; what arrives is on the device of the array that stands by as an example.

    Args:
        comm: The communicator of the ranks that take part.

    Attributes:
        comm: It.
        rank: This rank.
        ranks: Their number.
        traffic: Counts what this messenger has sent and received.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.ranks: int = comm.Get_size()
        self.traffic = Traffic()
        self._staging = Staging(comm)

    def by_node(self, node_ranks: int | None) -> tuple[int, Messenger, Messenger | None]:
        """Divides the ranks; a collective call the first time.

        Args:
            node_ranks: So many consecutive ranks count as one node; None: those that share memory.

        Returns:
            The number of nodes; a messenger of this rank's node; one of the nodes' first ranks, None on all others.
        """
        nodes, mine, leaders = split_by_node(self.comm, node_ranks)
        return nodes, Messenger(mine), None if leaders is None else Messenger(leaders)

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Something that the communicator keeps under a name for all messengers; made where there is nothing yet."""
        return kept(self.comm, name, make)

    def way(self, like: Array) -> Way:
        """This rank's way to MPI, for arrays of the device of ``like``."""
        return self._staging.own(like)

    def common_way(self, like: Array) -> Way:
        """The way of all ranks, for the MPI library's collectives."""
        return self._staging.common(like)

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
        nbytes = parcel.buffer.nbytes
        self._check_length(nbytes)
        self.traffic.send(nbytes)
        first, *others = _pieces(parcel.buffer)
        requests = [self.comm.Isend([first, MPI.BYTE], rank, _TAG)]
        if nbytes >= PIECE_BYTES:
            requests.append(self.comm.Isend(np.array([nbytes], np.int64), rank, _LENGTH))
            requests += [self.comm.Isend([piece, MPI.BYTE], rank, _PIECE) for piece in others]
        return Sending(requests, parcel)

    def receive(self, rank: int, like: Array) -> Receiving:
        """Waits until a message of a rank is announced, of whatever length, and begins to receive it.

        Args:
            rank: Where it comes from.
            like: Array on the device where the message is wanted.
        """
        status = MPI.Status()
        announced = self.comm.Mprobe(rank, _TAG, status)
        length = np.array([status.Get_count(MPI.BYTE)], np.int64)
        if length[0] == PIECE_BYTES:  # more may follow
            self.comm.Recv(length, rank, _LENGTH)
        parcel = self._staging.own(like).incoming(int(length[0]), like)
        self.traffic.receive(parcel.buffer.nbytes)
        first, *others = _pieces(parcel.buffer)
        requests = [announced.Irecv([first, MPI.BYTE])]
        requests += [self.comm.Irecv([piece, MPI.BYTE], rank, _PIECE) for piece in others]
        return Receiving(requests, parcel)

    def share(self, *numbers: int) -> Array:
        """Tells all ranks some numbers; returns int64 [ranks, len(numbers)]."""
        mine = np.array(numbers, np.int64)
        everyones = np.empty((self.ranks, mine.size), np.int64)
        self.comm.Allgather(mine, everyones)
        others = self.ranks - 1
        self.traffic.both(others * mine.nbytes, others * mine.nbytes, others.bit_length())
        return everyones

    def sum(self, values: Any) -> Array:
        """Sums an array over the ranks (MPI Allreduce), the same bits on every rank; returns a new array."""
        if self.ranks == 1:
            alone: Array = values.copy()
            return alone
        total: Array = np.empty_like(values)
        if isinstance(values, np.ndarray):  # as which most sums come; the device's have a way of their own
            self.comm.Allreduce(values, total)
        else:
            self._staging.common(values).sum(self.comm, values, total)
        others = self.ranks - 1
        messages = 2 * others if values.nbytes >= RING_BYTES else 2 * others.bit_length()
        share = 2 * values.nbytes * others / self.ranks
        self.traffic.both(share, share, messages)
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
            arriving = [self.comm.Irecv([piece, MPI.BYTE], left, _PIECE) for piece in _pieces(parcels[incoming].buffer)]
            leaving = [self.comm.Isend([piece, MPI.BYTE], right, _PIECE) for piece in _pieces(parcels[outgoing].buffer)]
            MPI.Request.Waitall(arriving + leaving)
            messages[incoming] = parcels[incoming].unload()
            self.traffic.both(lengths[outgoing], lengths[incoming], 1)
        for parcel in parcels:
            parcel.release()
        return messages

    def _allgatherv(self, message: Array, lengths: Sequence[int]) -> list[Array]:
        padded = -(-np.array(lengths) // _ALIGNMENT) * _ALIGNMENT
        starts = [0, *np.cumsum(padded).tolist()]
        way = self._staging.common(message)
        (own,), gathered = way.outgoing([message]), way.incoming(starts[-1], message)
        self.comm.Allgatherv(own.buffer, (gathered.buffer, (lengths, starts[:-1])))
        everyones = gathered.unload()
        own.release()
        gathered.release()
        others = self.ranks - 1
        # What a rank passes on depends on the algorithm; over all ranks as much is sent as is received.
        whole = sum(lengths)
        self.traffic.both(whole * others / self.ranks, whole - message.nbytes, others.bit_length())
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
        self.traffic.send(round(length * (self.ranks - 1) / self.ranks))
        return message

    def _check_length(self, nbytes: int) -> None:
        if nbytes > MPI_COUNT_MAX:
            raise RuntimeError(
                f"rank {self.rank} of {self.ranks}: a message of {nbytes} bytes is longer than MPI's limit of "
                f"{MPI_COUNT_MAX}: lower density or bucket_bytes"
            )


def _pieces(buffer: Array) -> list[Array]:
    """A message as MPI is given it: in pieces, the last of which may be shorter; an empty one in one piece, too."""
    return [buffer[start : start + PIECE_BYTES] for start in range(0, max(buffer.nbytes, 1), PIECE_BYTES)]
