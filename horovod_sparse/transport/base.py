"""The Transport protocol: all that rules, pipelines, control and checkpoints know of the network."""

from __future__ import annotations

import itertools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovod_sparse.kernels import copy_to_host, to_device, to_host
from horovod_sparse.kernels.types import Array
from horovod_sparse.transport.traffic import RING_BYTES, Traffic

# A longer message would overflow the counts of MPI, which are C ints.
MAX_MESSAGE_BYTES = 2**31 - 1
# Arrays gathered in one operation start at multiples of this, so that they can be viewed in any dtype.
_ALIGNMENT = 8
# Arrays of up to the first number of bytes, or the second one summed over the ranks, are gathered, and each rank adds
# all of them: one round of messages instead of two.
_GATHERED_SUM_BYTES, _GATHERED_SUM_TOTAL = 256, 1 << 14


class Sending(Protocol):
    """A message in flight; it must not change until ``wait`` returns."""

    def wait(self) -> None:
        """Wait until the message may change."""


class Receiving(Protocol):
    """A message that is being received."""

    def wait(self) -> Array:
        """Wait until the message has arrived, and return it. May be called once."""


class Nodes(NamedTuple):
    """The ranks of a transport by node.

    Attributes:
        number: Number of nodes.
        own: Transport of the ranks of this rank's node.
        leaders: Transport of the first rank of each node; None on all other ranks.
    """

    number: int
    own: Transport
    leaders: Transport | None


class Job(Protocol):
    """All processes that a launcher has started together.

    Attributes:
        rank: This process.
        size: Number of processes.
    """

    rank: int
    size: int

    @property
    def finalized(self) -> bool:
        """Tell whether communication has been shut down for good."""

    def on_finalize(self, call: Callable[[], None]) -> None:
        """Register a function that is called, on any thread, before communication is shut down."""

    def abort(self) -> None:
        """End all processes."""


class Transport(ABC):
    """Messages among the ranks of a group, every byte counted.

    Messages are uint8 arrays of one dimension on any device; received arrays are on the device of the array ``like``,
    or of the array given. A collective operation is called by all ranks of the group in the same order.

    Results have the same bits on every rank and over every transport: sums of floating-point numbers are taken in rank
    order.

    Subclasses implement the operations that begin with an underscore. Those move bytes and count nothing.

    Attributes:
        rank: This rank, from 0.
        size: World size of the group.
        job: All processes of the launcher; None: the ranks are threads of one process.
        traffic: Payload that this rank has sent and received over this object.
    """

    def __init__(self, rank: int, size: int, job: Job | None) -> None:
        self.rank = rank
        self.size = size
        self.job = job
        self.traffic = Traffic()
        self._kept: dict[str, Any] = {}  # shared by all channels of a connection

    # Operations on arrays

    def send(self, message: Array, rank: int) -> Sending:
        """Start to send a message.

        Raises:
            RuntimeError: The message is longer than ``MAX_MESSAGE_BYTES``.
        """
        return self.send_all([message], [rank], message)[0]

    def send_all(self, messages: Iterable[Array], ranks: Sequence[int], like: Array) -> list[Sending]:
        """Start to send several messages; on a device, wait for it once for all of them.

        Args:
            messages: One message for each of the ranks.
            ranks: Destinations.
            like: Array on the device of the messages.

        Raises:
            RuntimeError: A message is longer than ``MAX_MESSAGE_BYTES``.
        """
        return self._send_all(map(self._counted, messages), ranks, like)

    def _counted(self, message: Array) -> Array:
        self._check_length(message.nbytes)
        self.traffic.send(message.nbytes)
        return message

    def receive(self, rank: int, like: Array) -> Receiving:
        """Wait until a message of any length is announced, and start to receive it.

        Args:
            rank: Its source.
            like: Array on the device that the message is received on.
        """
        nbytes, receiving = self._receive(rank, like)
        self.traffic.receive(nbytes)
        return receiving

    def allgather(self, message: Array, lengths: Sequence[int]) -> list[Array]:
        """Return every rank's message, in rank order. A collective operation.

        Args:
            message: This rank's message.
            lengths: Bytes of every rank's message.

        Raises:
            RuntimeError: A message is longer than ``MAX_MESSAGE_BYTES``. Raised on all ranks.
        """
        self._check_length(max(lengths))
        if self.size == 1:
            return [message]
        padded = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
        *starts, end = itertools.accumulate(padded, initial=0)
        gathered = np.empty(end, np.uint8, like=message)
        parts = [gathered[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        parts[self.rank][:] = message
        self._gather(gathered, starts, lengths)
        self._count_gather(lengths)
        return parts

    def _count_gather(self, lengths: Sequence[int]) -> None:
        """Count an allgather: a ring, or what a rank forwards on average with fewer messages."""
        total, others = sum(lengths), self.size - 1
        if total >= RING_BYTES:
            self.traffic.both(total - lengths[(self.rank + 1) % self.size], total - lengths[self.rank], others)
        else:
            self.traffic.both(total * others / self.size, total - lengths[self.rank], others.bit_length())

    def allgather_integers(self, *numbers: int) -> Array:
        """Return every rank's numbers as int64 [size, len(numbers)]. A collective operation."""
        mine = np.array(numbers, np.int64)
        everyones = np.empty((self.size, mine.size), np.int64)
        everyones[self.rank] = mine
        if self.size > 1:
            self._gather_rows(everyones)
        others = self.size - 1
        self.traffic.both(others * mine.nbytes, others * mine.nbytes, others.bit_length())
        return everyones

    def allreduce(self, values: Any) -> Array:
        """Return the sum of an array over the ranks, with the same bits on every rank. A collective operation.

        Args:
            values: Array of one dimension, of integers or floating-point numbers; not changed.
        """
        if self.size == 1:
            copy: Array = values.copy()
            return copy
        if values.dtype.kind in "iu":
            return self._allreduce_integers(values)
        if values.nbytes <= _GATHERED_SUM_BYTES or values.nbytes * self.size <= _GATHERED_SUM_TOTAL:
            return self._allreduce_gathered(values)
        return self._allreduce_regions(values)

    def _allreduce_integers(self, values: Any) -> Array:
        total, others = copy_to_host(values), self.size - 1
        self._sum_integers(total)
        messages = 2 * others if values.nbytes >= RING_BYTES else 2 * others.bit_length()
        share = 2 * values.nbytes * others / self.size
        self.traffic.both(share, share, messages)
        summed: Array = to_device(total, values)
        return summed

    def _allreduce_gathered(self, values: Any) -> Array:
        """Each rank adds up everything, in rank order."""
        rows = np.empty((self.size, values.size), values.dtype)
        rows[self.rank] = to_host(values)
        self._gather_rows(rows)
        self._count_gather([values.nbytes] * self.size)
        total = rows[0]
        for row in rows[1:]:
            total += row
        summed: Array = to_device(total, values)
        return summed

    def _allreduce_regions(self, values: Array) -> Array:
        """Each rank adds up one region, in rank order, and the regions are gathered."""
        cuts = [rank * values.size // self.size * values.itemsize for rank in range(self.size + 1)]
        starts, lengths = cuts[:-1], [end - start for start, end in itertools.pairwise(cuts)]
        total = np.empty_like(values)
        own = total.view(np.uint8)[cuts[self.rank] : cuts[self.rank + 1]].view(values.dtype)
        for rank, part in enumerate(self._swap(values.view(np.uint8), starts, lengths)):
            if rank == 0:
                own[:] = part.view(values.dtype)
            else:
                own += part.view(values.dtype)
        others = self.size - 1
        self.traffic.both(values.nbytes - own.nbytes, others * own.nbytes, others)
        self._gather(total.view(np.uint8), starts, lengths)
        self._count_gather(lengths)
        return total

    def broadcast(self, message: Array, length: int) -> Array:
        """Return rank 0's message. A collective operation.

        Args:
            message: On rank 0, the message; elsewhere an array on the device that it is received on.
            length: Bytes of the message; the same on every rank.

        Raises:
            RuntimeError: The message is longer than ``MAX_MESSAGE_BYTES``. Raised on all ranks.
        """
        self._check_length(length)
        if self.size == 1:
            return message
        if self.rank > 0:
            message = np.empty(length, np.uint8, like=message)
            self.traffic.receive(length)
        self._broadcast(message)
        self.traffic.send(round(length * (self.size - 1) / self.size))
        return message

    # Operations on Python objects, for construction, checkpoints and reports: not counted

    def allgather_object(self, item: Any) -> list[Any]:
        """Return every rank's object, in rank order. A collective operation."""
        if self.size == 1:
            return [item]
        content = pickle.dumps(item)
        lengths = np.zeros((self.size, 1), np.int64)
        lengths[self.rank] = len(content)
        self._gather_rows(lengths)
        cuts = [0, *np.cumsum(lengths).tolist()]
        gathered = np.empty(cuts[-1], np.uint8)
        gathered[cuts[self.rank] : cuts[self.rank + 1]] = np.frombuffer(content, np.uint8)
        self._gather(gathered, cuts[:-1], lengths[:, 0].tolist())
        return [_decoded(gathered[begin:end]) for begin, end in itertools.pairwise(cuts)]

    def broadcast_object(self, item: Any = None) -> Any:
        """Return rank 0's object. A collective operation."""
        if self.size == 1:
            return item
        content = np.frombuffer(pickle.dumps(item), np.uint8).copy() if self.rank == 0 else np.empty(0, np.uint8)
        length = np.array([content.size], np.int64)
        self._broadcast(length.view(np.uint8))
        if self.rank > 0:
            content = np.empty(length[0], np.uint8)
        self._broadcast(content)
        return item if self.rank == 0 else _decoded(content)

    def gather_object(self, item: Any) -> list[Any] | None:
        """Return every rank's object on rank 0, and None elsewhere. A collective operation."""
        if self.rank > 0:
            (sending,) = self._send_all([np.frombuffer(pickle.dumps(item), np.uint8)], [0], np.empty(0, np.uint8))
            sending.wait()
            return None
        others = (self._receive(rank, np.empty(0, np.uint8))[1].wait() for rank in range(1, self.size))
        return [item, *map(_decoded, others)]

    @abstractmethod
    def barrier(self, pause: float = 0.0) -> None:
        """Wait until all ranks have called this.

        Args:
            pause: Seconds to sleep between two looks, where a wait may be long and others need the core.
        """

    # Groups and objects

    @abstractmethod
    def channel(self) -> Transport:
        """Return a transport of the same ranks, over the same connection, that counts traffic of its own."""

    @abstractmethod
    def duplicate(self) -> Transport:
        """Return a transport of the same ranks whose messages never meet those of this one. A collective operation."""

    def by_node(self, node_ranks: int | None) -> Nodes:
        """Divide the ranks by node. A collective operation, in the first call with an argument.

        Args:
            node_ranks: This many consecutive ranks, at least 1, count as one node; None: ranks that share memory.
        """
        nodes: Nodes = self.keep(nodes_of(node_ranks), lambda: self._split(node_ranks))
        return Nodes(nodes.number, nodes.own.channel(), nodes.leaders and nodes.leaders.channel())

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return an object that all channels of this connection share; made by the first call with its name."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    # Messages between control threads

    @property
    @abstractmethod
    def members(self) -> list[int]:
        """Ranks of the group's ranks in the job."""

    @abstractmethod
    def post(self, content: Any, rank: int, kind: int) -> None:
        """Send an object to the control thread of a rank, without waiting for it.

        Args:
            content: Short object.
            rank: Destination.
            kind: Which of the rank's mailboxes, from 0 to 9.
        """

    @abstractmethod
    def poll(self, kind: int) -> list[tuple[int, Any]]:
        """Return source and content of each posted object of a kind that has arrived. Never waits."""

    # What an implementation provides

    @abstractmethod
    def _split(self, node_ranks: int | None) -> Nodes:
        """Divide the ranks, as ``by_node`` does in its first call."""

    @abstractmethod
    def _send_all(self, messages: Iterable[Array], ranks: Sequence[int], like: Array) -> list[Sending]: ...

    @abstractmethod
    def _receive(self, rank: int, like: Array) -> tuple[int, Receiving]:
        """Return the length of the next message from a rank, and the message."""

    @abstractmethod
    def _swap(self, message: Array, starts: Sequence[int], lengths: Sequence[int]) -> Iterator[Array]:
        """Send part r of a message to rank r; yield the parts for this rank, in rank order."""

    @abstractmethod
    def _gather(self, gathered: Array, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Complete an array of bytes, of which each rank has filled the part of its own."""

    @abstractmethod
    def _gather_rows(self, rows: Array) -> None:
        """Complete an array of the host, of which each rank has filled the row of its number."""

    @abstractmethod
    def _broadcast(self, message: Array) -> None:
        """Overwrite an array by rank 0's."""

    @abstractmethod
    def _sum_integers(self, values: Array) -> None:
        """Replace an array of integers by its sum over the ranks."""

    def _check_length(self, nbytes: int) -> None:
        if nbytes > MAX_MESSAGE_BYTES:
            raise RuntimeError(
                f"rank {self.rank} of {self.size}: a message of {nbytes} bytes is longer than the limit of "
                f"{MAX_MESSAGE_BYTES}: lower density or bucket_bytes"
            )


def nodes_of(node_ranks: int | None) -> str:
    """Return the name that a transport keeps its nodes under."""
    return f"nodes of {node_ranks}"


def _decoded(content: Array) -> Any:
    return pickle.loads(content.tobytes())  # noqa: S301 - from a rank of the same job
