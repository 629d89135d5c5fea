"""Base class of transports: the network interface of rules, pipelines, control and checkpoints."""

from __future__ import annotations

import itertools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from horovod_sparse.kernels import add_to, copied, copy_to_host, to_device, to_host
from horovod_sparse.kernels.scratch import SCRATCH
from horovod_sparse.kernels.types import Array
from horovod_sparse.transport.doubling import DIRECT_RANKS
from horovod_sparse.transport.nodes import Nodes, nested_nodes, nodes_of
from horovod_sparse.transport.slots import Slots
from horovod_sparse.transport.traffic import GATHERED_SUM_BYTES, GATHERED_SUM_TOTAL, RING_BYTES, Traffic
from horovod_sparse.transport.waiting import Waiting

T = TypeVar("T")

# A longer message would overflow MPI's counts, which are C ints.
MAX_MESSAGE_BYTES = 2**31 - 1
# Gathered arrays start at multiples of this many bytes, so that they can be viewed in any dtype.
_ALIGNMENT = 8
# In a slot, length and number of a message precede its bytes.
_SLOT_HEADER_BYTES = 16


class Sending(Protocol):
    """Outgoing message in flight, which must not be modified until ``wait`` returns."""

    def wait(self) -> None:
        """Wait until the message may be modified."""


class Receiving(Protocol):
    """Incoming message in flight."""

    def wait(self) -> Array:
        """Wait until the message has arrived, and return it. Must be called at most once."""


class Request:
    """Collective operation in flight, which owns its arrays until it is complete.

    One that nobody waits for keeps them for good: MPI may still write to them, and Gloo gives a message to the next
    receive if the one that it is for no longer exists.

    Args:
        finish: Waits for the other ranks and returns the result.
    """

    _kept: ClassVar[list[Callable[[], Array]]] = []

    def __init__(self, finish: Callable[[], Array]) -> None:
        self._finish: Callable[[], Array] | None = finish

    def wait(self) -> Array:
        """Wait for the other ranks and return the result. Must be called at most once."""
        assert self._finish is not None, "a request was waited for twice"
        result, self._finish = self._finish(), None
        return result

    def __del__(self) -> None:
        """Keep the arrays of an operation that is not complete."""
        if self._finish is not None:
            self._kept.append(self._finish)


class Job(Protocol):
    """Processes that a launcher has started together.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
    """

    rank: int
    size: int

    @property
    def finalized(self) -> bool:
        """True after communication has been shut down for good."""

    def on_finalize(self, call: Callable[[], None]) -> None:
        """Register a function to be called, on any thread, before communication is shut down."""

    def abort(self) -> None:
        """End all processes."""


class Transport(ABC):
    """Communication between the ranks of a group, with traffic counters.

    Messages are one-dimensional uint8 arrays on any device. Received arrays are on the device of the argument ``like``
    or, without it, of the array argument. All ranks of the group call collective operations in the same order.

    Results are bitwise identical on every rank and over every transport, because floating-point numbers are added in
    rank order: where several nodes have several ranks each, first those of a node, then those of the nodes.

    Subclasses implement the abstract methods. Those with an underscore move bytes without counting them.

    Attributes:
        rank: Rank of this process or thread in the group, from 0.
        size: Number of ranks in the group.
        job: Job of this process; None: the ranks are threads of one process.
        traffic: Payload that this rank has sent and received over this object.
        waiting: How this rank waits, if that is for us to choose; shared by all transports that are made from one.
    """

    waiting: Waiting | None = None

    def __init__(self, rank: int, size: int, job: Job | None) -> None:
        self.rank = rank
        self.size = size
        self.job = job
        self.traffic = Traffic()
        self._kept: dict[str, Any] = {}  # shared by all channels of a connection
        self._measured: dict[str, Any] = {}  # likewise
        self._nodes_found: tuple[()] | tuple[Nodes | None] = ()  # of ``nodes_for_sums``, after the first call

    # Operations on arrays

    def send(self, message: Array, rank: int) -> Sending:
        """Start sending a message.

        Raises:
            RuntimeError: The message is longer than ``MAX_MESSAGE_BYTES``.
        """
        return self.send_all([message], [rank], message)[0]

    def send_all(self, messages: Iterable[Array], ranks: Sequence[int], like: Array) -> list[Sending]:
        """Start sending a message to each of several ranks.

        Messages on a GPU are synchronized once for all of them. ``like`` is an array on their device.

        Raises:
            RuntimeError: A message is longer than ``MAX_MESSAGE_BYTES``.
        """
        return self._send_all(map(self._counted, messages), ranks, like)

    def _counted(self, message: Array) -> Array:
        self._check_length(message.nbytes)
        self.traffic.send(message.nbytes)
        return message

    def receive(self, rank: int, like: Array) -> Receiving:
        """Wait for the next message from a rank, of any length, and start receiving it on the device of ``like``."""
        nbytes, receiving = self._receive(rank, like)
        self.traffic.receive(nbytes)
        return receiving

    def allgather(self, message: Array, lengths: Sequence[int]) -> list[Array]:
        """Return every rank's message, in rank order. A collective operation.

        Args:
            message: Message of this rank.
            lengths: Length of every rank's message in bytes.

        Raises:
            RuntimeError: A message is longer than ``MAX_MESSAGE_BYTES``. Raised on all ranks.
        """
        self._check_length(max(lengths))
        if self.size == 1:
            return [message]
        starts, end = [], 0
        for length in lengths:
            starts.append(end)
            end += -(-length // _ALIGNMENT) * _ALIGNMENT
        gathered = SCRATCH.empty(end, message)
        parts = [gathered[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        parts[self.rank][:] = message
        self.traffic.rounds += 1
        self._gather(gathered, starts, lengths)
        self._count_gather(lengths)
        return parts

    def allgather_slots(self, message: Any, slots: Slots, number: int = 0) -> tuple[list[Array], list[int]]:
        """Return every rank's message and number, in rank order. A collective operation.

        One round of messages if all messages fit into the slots; otherwise a second round brings the rest. Arrays on a
        GPU always take two rounds, as reading the lengths out of a slot would wait for the device.

        Args:
            message: Message of this rank, of any length.
            slots: Space for the messages, adapted for the next call.
            number: Integer of this rank.

        Raises:
            RuntimeError: A message is longer than ``MAX_MESSAGE_BYTES``. Raised on all ranks.
        """
        if self.size == 1:
            return [message], [number]
        if not isinstance(message, np.ndarray):
            headers = self.allgather_integers(message.nbytes, number)
            return self.allgather(message, headers[:, 0].tolist()), headers[:, 1].tolist()
        stride = _SLOT_HEADER_BYTES + slots.size
        slot = np.zeros(stride, np.uint8)
        slot[:_SLOT_HEADER_BYTES] = np.array([message.nbytes, number], np.int64).view(np.uint8)
        slot[_SLOT_HEADER_BYTES : _SLOT_HEADER_BYTES + message.nbytes] = message[: slots.size]
        gathered = self.allgather(slot, [stride] * self.size)
        messages, lengths, numbers = [], [], []
        for received in gathered:
            length, theirs = received[:_SLOT_HEADER_BYTES].view(np.int64).tolist()
            lengths.append(length)
            numbers.append(theirs)
            messages.append(received[_SLOT_HEADER_BYTES : _SLOT_HEADER_BYTES + length])
        size = slots.size
        slots.adapt(lengths)
        if max(lengths) > size:
            self._check_length(max(lengths))
            rests = self.allgather(message[size:], [max(0, length - size) for length in lengths])
            messages = [
                np.concatenate([first, rest]) if first.size and rest.size else rest if rest.size else first
                for first, rest in zip(messages, rests, strict=True)
            ]
        return messages, numbers

    def _count_gather(self, lengths: Sequence[int]) -> None:
        """Count an allgather: a ring from ``RING_BYTES`` on, else log2 P messages and a rank's average bytes sent."""
        total, others = sum(lengths), self.size - 1
        if total >= RING_BYTES:
            self.traffic.both(total - lengths[(self.rank + 1) % self.size], total - lengths[self.rank], others)
        else:
            self.traffic.both(total * others / self.size, total - lengths[self.rank], others.bit_length())

    def allgather_integers(self, *numbers: int) -> Array:
        """Return the numbers of all ranks as int64 [size, len(numbers)]. A collective operation."""
        mine = np.array(numbers, np.int64)
        everyones = np.empty((self.size, mine.size), np.int64)
        everyones[self.rank] = mine
        if self.size > 1:
            self.traffic.rounds += 1
            self._gather_rows(everyones)
        others = self.size - 1
        self.traffic.both(others * mine.nbytes, others * mine.nbytes, others.bit_length())
        return everyones

    def _rows(self, row: Array, waits: bool) -> Callable[[], Array]:
        """Gather an array of the same length from all ranks; the caller keeps what is returned until it was called."""
        rows = np.empty((self.size, row.size), row.dtype)
        rows[self.rank] = row
        if self.size == 1:
            return lambda: rows
        self._count_gather([row.nbytes] * self.size)
        if waits:
            self._gather_rows(rows)
            return lambda: rows
        wait = self._start_gather(rows)

        def finish() -> Array:
            wait()
            return rows

        return finish

    def allreduce(self, values: Any) -> Array:
        """Return the sum of an array over the ranks, bitwise identical on all of them. A collective operation.

        Args:
            values: One-dimensional array of integers or floating-point numbers; not modified.
        """
        if self.size > 1:
            self.traffic.rounds += 1
        return self._begin_sum(values, waits=True).wait()

    def allreduce_in_place(self, values: Array) -> None:
        """Overwrite a floating-point array with its sum over the ranks, as ``allreduce``, without further arrays."""
        if self.size > 1 and self._in_regions(values):
            self.traffic.rounds += 1
            self._sum_regions(values, values).wait()
        else:
            values[:] = self.allreduce(values)

    def begin_allreduce(self, values: Any) -> Request:
        """Start to sum an array over the ranks, as ``allreduce``, while other messages are exchanged.

        All ranks start their operations in the same order. They may wait in any order for gatherings and for sums of
        integers or of less than 256 bytes; for longer sums, in the same order. The first round is not counted in
        ``traffic``: it is the caller who knows whether it waits for that round alone.
        """
        return self._begin_sum(values, waits=False)

    def _begin_sum(self, values: Any, *, waits: bool) -> Request:
        """Start a sum; ``waits``: the caller waits for it at once."""
        if self.size == 1:
            return Request(partial(copied, values))
        short = values.nbytes * self.size <= GATHERED_SUM_TOTAL
        if values.dtype.kind in "iu" and not (short and (waits or self.size <= DIRECT_RANKS)):
            return self._sum_integers(values)
        if self._in_regions(values):
            return self._sum_regions(values, SCRATCH.empty(values.size, values))
        return self._sum_gathered(values, waits)

    def _in_regions(self, values: Array) -> bool:
        """Return whether a sum of floating-point numbers takes fewer bytes or fewer rounds."""
        return values.dtype.kind == "f" and values.nbytes > max(GATHERED_SUM_BYTES, GATHERED_SUM_TOTAL // self.size)

    def _sum_integers(self, values: Any) -> Request:
        total, others = copy_to_host(values), self.size - 1
        wait = self._start_sum(total)
        messages = 2 * others if values.nbytes >= RING_BYTES else 2 * others.bit_length()
        share = 2 * values.nbytes * others / self.size
        self.traffic.both(share, share, messages)

        def finish() -> Array:
            wait()
            return to_device(total, values)

        return Request(finish)

    def _sum_gathered(self, values: Any, waits: bool) -> Request:
        """Gather all arrays, and add them on each rank in rank order."""
        gathered = self._rows(to_host(values), waits)

        def finish() -> Array:
            total, *others = gathered()
            for row in others:
                total += row
            return to_device(total, values)

        return Request(finish)

    def _sum_regions(self, values: Array, total: Array) -> Request:
        """Add one region of the array on each rank in rank order, and gather the regions in ``total``.

        Where several nodes have several ranks each, regions are those of the ranks of a node; peers then sum theirs
        across the nodes. A node then sends the bytes that one rank alone would send.
        """
        nodes = self.nodes_for_sums()
        group = self if nodes is None else nodes.own
        cuts = [rank * values.size // group.size * values.itemsize for rank in range(group.size + 1)]
        starts, lengths = cuts[:-1], [end - start for start, end in itertools.pairwise(cuts)]
        own_bytes, others = lengths[group.rank], group.size - 1
        received = SCRATCH.empty(group.size * own_bytes, values, np.uint8)
        parts = group._swap(values.view(np.uint8), starts, lengths, received)
        self.traffic.both(values.nbytes - own_bytes, others * own_bytes, others)

        def finish() -> Array:
            own = next(parts).view(values.dtype)
            for part in parts:
                add_to(own, part.view(values.dtype))
            if nodes is not None:
                nodes.peers.allreduce_in_place(own)
            total.view(np.uint8)[cuts[group.rank] : cuts[group.rank + 1]] = own.view(np.uint8)
            self.traffic.rounds += 1
            group._gather(total.view(np.uint8), starts, lengths)
            group._count_gather(lengths)
            return total

        return Request(finish)

    def nodes_for_sums(self) -> Nodes | None:
        """Return the nodes if they are ``nested``, else None.

        Their traffic is counted as that of this transport. A collective operation in the first call.
        """
        if not self._nodes_found:
            nodes = nested_nodes(self)
            self._nodes_found = (None if nodes is None else nodes.counting(self.traffic),)
        return self._nodes_found[0]

    # Operations on objects and flags, for construction, checkpoints and reports. Their traffic is not counted.

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

    def anywhere(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank. A collective operation."""
        flags = np.zeros((self.size, 1), np.uint8)
        flags[self.rank] = flag
        if self.size > 1:
            self._gather_rows(flags)
        return bool(flags.any())

    @abstractmethod
    def barrier(self, pause: float = 0.0) -> None:
        """Wait until all ranks have called this method.

        Args:
            pause: Seconds to sleep between checks, for long waits while other work needs the core; 0: no sleep.
        """

    # Groups and shared objects

    @abstractmethod
    def channel(self) -> Transport:
        """Return a transport of the same ranks over the same connection, with a separate traffic counter."""

    @abstractmethod
    def duplicate(self) -> Transport:
        """Return a transport of the same ranks with separate message matching. A collective operation."""

    def by_node(self, node_ranks: int | None) -> Nodes:
        """Divide the ranks by node. A collective operation in the first call with each argument.

        Args:
            node_ranks: Number of consecutive ranks that count as one node, at least 1; None: ranks that share memory.
        """
        return nodes_of(self, node_ranks).counting()

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """Return the object of this name that all channels of the connection share. The first call creates it."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: T = self._kept[name]
        return kept

    def measured(self, name: str, measure: Callable[[], T]) -> T:
        """Return the measurement of this name that all channels of the connection share. The first call makes it.

        A collective operation in the first call.
        """
        if name not in self._measured:
            self._measured[name] = measure()
        found: T = self._measured[name]
        return found

    def inherit(self, earlier: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Take over measurements of earlier connections of the same ranks, and return this connection's. Collective.

        Exchanges then decide alike. Those of a connection that some ranks are still measuring are not taken over.

        Args:
            earlier: What this method has returned for earlier connections of these ranks, in the same order on all.
        """
        counts = self.allgather_integers(*(len(measured) for measured in earlier))
        for measured, count in zip(earlier, counts.T, strict=True):
            if (count == count[0]).all():
                self._measured.update({**measured, **self._measured})  # the oldest ones count
        return self._measured

    # Messages between control threads

    @property
    @abstractmethod
    def members(self) -> list[int]:
        """World ranks of the group's members, by rank in the group."""

    def avoid_nccl(self) -> None:  # noqa: B027 - most transports have no NCCL
        """Send device arrays through the host instead of NCCL, which the script uses at the same time.

        To be called before the first exchange.
        """

    def mailboxes(self) -> Transport:
        """Return a transport of the same mailboxes that keeps no connection open, where ``post`` needs none."""
        return self

    @abstractmethod
    def post(self, content: Any, rank: int, kind: int) -> None:
        """Send an object to the control thread of a rank, without waiting for that rank.

        Args:
            content: Short object that can be pickled.
            rank: Destination.
            kind: Number of the destination's mailbox, from 0 to 9.
        """

    @abstractmethod
    def poll(self, kind: int) -> list[tuple[int, Any]]:
        """Return source and content of each object that has arrived in a mailbox. Never blocks."""

    # Primitives that implementations provide

    @abstractmethod
    def split(self, node_ranks: int | None) -> Nodes:
        """Divide the ranks by node, for the first call of ``by_node``."""

    @abstractmethod
    def _send_all(self, messages: Iterable[Array], ranks: Sequence[int], like: Array) -> list[Sending]: ...

    @abstractmethod
    def _receive(self, rank: int, like: Array) -> tuple[int, Receiving]:
        """Wait for the next message from a rank; return its length in bytes and the incoming message."""

    @abstractmethod
    def _swap(self, message: Array, starts: Sequence[int], lengths: Sequence[int], received: Array) -> Iterator[Array]:
        """Start sending part r of a message to rank r; the iterator waits for this rank's parts, in rank order.

        They may be modified. The message may be once all are there; ``received`` has space for them.
        """

    @abstractmethod
    def _gather(self, gathered: Array, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Gather an array of bytes in place; each rank has filled its part."""

    def _gather_rows(self, rows: Array) -> None:
        """Gather the rows of a host array in place, each rank its row ``rank``."""
        row_bytes = rows[0].nbytes
        starts = [row_bytes * rank for rank in range(self.size)]
        self._gather(rows.reshape(-1).view(np.uint8), starts, [row_bytes] * self.size)

    @abstractmethod
    def _start_gather(self, rows: Array) -> Callable[[], object]:
        """Start gathering the rows of a host array in place, each rank its row ``rank``; return what waits for them.

        Several may be in flight, and be waited for in different orders on different ranks.
        """

    @abstractmethod
    def _broadcast(self, message: Array) -> None:
        """Overwrite an array with that of rank 0."""

    @abstractmethod
    def _start_sum(self, values: Array) -> Callable[[], object]:
        """Start summing a host array of integers over the ranks, in place; return what waits for the sum."""

    def _check_length(self, nbytes: int) -> None:
        if nbytes > MAX_MESSAGE_BYTES:
            raise RuntimeError(
                f"rank {self.rank} of {self.size}: a message of {nbytes} bytes exceeds the limit of "
                f"{MAX_MESSAGE_BYTES}: lower density or bucket_bytes"
            )


def _decoded(content: Array) -> Any:
    return pickle.loads(content.tobytes())  # noqa: S301 - from a rank of the same job
