"""Transport over torch.distributed, for ranks that torchrun or another launcher without MPI has started.

Host arrays travel over Gloo, in connections that only this package uses: the order of its messages does not depend on
the collectives of DDP or of the script. Collectives of device arrays run on NCCL, without copies, where each rank has
its own GPU. Messages between two ranks always go through host memory: in NCCL, a message whose receiver has not asked
for it yet would block those behind it. Control messages go through the store of the job.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path as File
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.utils.dlpack import from_dlpack

from horovod_sparse.kernels.scratch import SCRATCH
from horovod_sparse.kernels.types import Array
from horovod_sparse.transport import doubling
from horovod_sparse.transport.base import Receiving, Sending, Transport
from horovod_sparse.transport.cuda_aware import VARIABLE
from horovod_sparse.transport.nodes import Nodes
from horovod_sparse.transport.staging import IN_PLACE, Buffer, Path, staged
from horovod_sparse.transport.torch_job import FOREVER, job
from horovod_sparse.transport.traffic import RING_BYTES

# Gloo matches messages by tag: lengths of messages, messages, parts of collectives.
_LENGTH, _MESSAGE, _PART = 1, 2, 3


class _Family:
    """Connections that were derived from one, whose collectives all ranks call in the same order.

    Attributes:
        on_host: Whether they never use NCCL.
    """

    on_host = False


# Those whose collectives run on NCCL: one at most. All exchanges of a process use one stream, in which collectives of
# two of them could be in another order on each rank, and NCCL would wait forever.
_on_nccl: weakref.WeakSet[_Family] = weakref.WeakSet()
_choosing = threading.Lock()


class _Connection:
    """Connections among some ranks of the job, in which messages are matched; shared by the channels of a transport.

    Args:
        members: World ranks of the members.
        name: Name that no other connection of any of these ranks has.
        family: Family of the connection that this one is derived from; None: a new one.
    """

    def __init__(self, members: Sequence[int], name: str, family: _Family | None = None) -> None:
        self.members = list(members)
        self.name = name
        self.family = family or _Family()
        self.rank = self.members.index(job().rank)
        self.to_itself = queue.SimpleQueue[Array]()
        self.parts = 0  # number of times that parts were derived
        self._lock = threading.Lock()
        self._gloo: Any = None

    @property
    def gloo(self) -> Any:
        """Gloo's connections; the first use is collective."""
        with self._lock:
            if self._gloo is None:
                self._gloo = ProcessGroupGloo(job().store(self.name), self.rank, len(self.members), FOREVER)
        return self._gloo

    def part(self, ranks: Sequence[int], name: str = "") -> TorchTransport:
        """Return a connected transport of some members, given by their ranks here, each with the same name."""
        members = [self.members[rank] for rank in ranks]
        return TorchTransport(_Connection(members, f"{self.name}.{self.parts}{name}", self.family)).connect()


class TorchTransport(Transport):
    """Transport among ranks of torch's default process group.

    Args:
        connection: Connection of the ranks.
    """

    def __init__(self, connection: _Connection) -> None:
        super().__init__(connection.rank, len(connection.members), job())
        self._connection = connection

    @classmethod
    def of(cls, members: Sequence[int]) -> TorchTransport:
        """Return a new transport of the ranks with these world ranks, in this order; all of them call this together.

        Before ``connect``, it only reaches mailboxes.
        """
        return cls(_Connection(members, job().name_of(members)))

    def connect(self) -> TorchTransport:
        """Connect all ranks, and return this transport. A collective operation."""
        if self.size > 1:
            _ = self._connection.gloo
        return self

    # Operations on arrays

    def _send_all(self, messages: Iterable[Array], ranks: Sequence[int], like: Array) -> list[Sending]:
        buffers = _path(like).outgoing(messages)
        return [self._send(buffer, rank) for buffer, rank in zip(buffers, ranks, strict=True)]

    def _send(self, buffer: Buffer, rank: int) -> Sending:
        if rank == self.rank:  # Gloo has no connection of a rank to itself
            self._connection.to_itself.put(buffer.array.copy())
            return _Message([], buffer, buffer.array)
        length = np.array([buffer.array.nbytes], np.int64)
        sends = [self._to(rank, length, _LENGTH), self._to(rank, buffer.array, _MESSAGE)]
        return _Message(sends, buffer, buffer.array)

    def _receive(self, rank: int, like: Array) -> tuple[int, Receiving]:
        length = np.empty(1, np.int64)
        own = self._connection.to_itself.get() if rank == self.rank else None
        if own is None:
            self._from(rank, length, _LENGTH)()
        else:
            length[0] = own.nbytes
        message = SCRATCH.empty(int(length[0]), like, np.uint8)
        (buffer,) = _path(like).incoming([message])
        if own is None:
            return message.nbytes, _Message([self._from(rank, buffer.array, _MESSAGE)], buffer, message)
        buffer.array[:] = own
        return message.nbytes, _Message([], buffer, message)

    def _swap(self, message: Array, starts: Sequence[int], lengths: Sequence[int], received: Array) -> Iterator[Array]:
        own = lengths[self.rank]
        parts = [received[own * rank : own * (rank + 1)] for rank in range(self.size)]
        nccl = self._nccl(message) if all(lengths) else None
        if nccl is not None:
            into, out_of = from_dlpack(received), from_dlpack(message)
            work = nccl.alltoall_base(into, out_of, [own] * self.size, list(lengths))
            return _after(work, parts)
        path = _path(message)
        (leaving,), (arriving,) = path.outgoing([message]), path.incoming([received])
        slots = [arriving.array[own * rank : own * (rank + 1)] for rank in range(self.size)]
        leaves = [leaving.array[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        slots[self.rank][:] = leaves[self.rank]
        receives = self._from_all(slots)
        sends = self._to_all(leaves)

        def arrived() -> Iterator[Array]:
            if arriving.array is not received:  # staged: one copy to the device after all parts have arrived
                for wait in receives:
                    wait()
                receives[:] = [_nothing] * self.size
            arriving.close()
            for wait, part in zip(receives, parts, strict=True):
                wait()
                yield part
            for wait in sends:
                wait()
            leaving.close()

        return arrived()

    def _gather(self, gathered: Array, starts: Sequence[int], lengths: Sequence[int]) -> None:
        cuts = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        nccl = self._nccl(gathered) if all(lengths) else None
        if nccl is not None:
            parts = [from_dlpack(gathered[cut]) for cut in cuts]
            nccl.allgather([parts], [parts[self.rank]]).wait()
            return
        path = _path(gathered)
        (own,), (target,) = path.outgoing([gathered[cuts[self.rank]]]), path.incoming([gathered])
        if target.array is not gathered:
            target.array[cuts[self.rank]] = own.array
        self._gather_parts([target.array[cut] for cut in cuts])
        target.close()
        own.close()

    def _start_gather(self, rows: Array) -> Callable[[], None]:
        return self._start_parts(list(rows))

    def _start_parts(self, parts: Sequence[Array]) -> Callable[[], None]:
        waits = [*self._from_all(parts), *self._to_all([parts[self.rank]] * self.size)]

        def finish() -> None:
            for wait in waits:
                wait()

        return finish

    def _gather_parts(self, parts: Sequence[Array]) -> None:
        """Gather host arrays in place; each rank has filled its own."""
        if self.size > doubling.DIRECT_RANKS and sum(part.nbytes for part in parts) < RING_BYTES:
            doubling.gather_by_doubling(parts, self.rank, self._trade)
        else:
            self._start_parts(parts)()

    def _trade(self, sent: Array, to: int, received: Array, origin: int) -> None:
        """Send a host array to a rank, and receive one of known length from another."""
        for wait in (self._from(origin, received, _PART), self._to(to, sent, _PART)):
            wait()

    def _broadcast(self, message: Array) -> None:
        """Broadcast along a binomial tree: a rank's parent lacks its lowest bit."""
        path = _path(message)
        (buffer,) = path.outgoing([message]) if self.rank == 0 else path.incoming([message])
        lowest = self.rank & -self.rank or 1 << self.size.bit_length()
        if self.rank:
            self._from(self.rank - lowest, buffer.array, _PART)()
        children = [self.rank + (1 << bit) for bit in range(lowest.bit_length() - 1)]
        waits = [self._to(child, buffer.array, _PART) for child in reversed(children) if child < self.size]
        for wait in waits:
            wait()
        buffer.close()

    def _start_sum(self, values: Array) -> Callable[[], None]:
        rows = np.empty((self.size, values.size), values.dtype)
        rows[self.rank] = values
        wait = self._start_gather(rows)

        def finish() -> None:
            wait()
            np.sum(rows, axis=0, dtype=values.dtype, out=values)

        return finish

    def barrier(self, pause: float = 0.0) -> None:
        """Wait until all ranks have called this method; ``pause`` is ignored, as waiting in Gloo takes no core."""
        del pause
        self._gather_rows(np.zeros((self.size, 1), np.uint8))

    def _to_all(self, arrays: Sequence[Array]) -> list[Callable[[], None]]:
        """Start sending an array to each other rank; each rank begins with another destination."""
        ranks = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        return [self._to(rank, arrays[rank], _PART) for rank in ranks]

    def _from_all(self, arrays: Sequence[Array]) -> list[Callable[[], None]]:
        """Start receiving an array from each other rank; return what waits for each rank's, in rank order."""
        ranks = range(self.size)
        return [_nothing if rank == self.rank else self._from(rank, arrays[rank], _PART) for rank in ranks]

    def _to(self, rank: int, array: Array, tag: int) -> Callable[[], None]:
        return self._start(self._connection.gloo.send, rank, array, tag)

    def _from(self, rank: int, array: Array, tag: int) -> Callable[[], None]:
        return self._start(self._connection.gloo.recv, rank, array, tag)

    def _start(self, operation: Callable[..., Any], rank: int, array: Array, tag: int) -> Callable[[], None]:
        """Start an operation with a rank, and return what waits for it; both raise errors that name the rank."""
        failed = partial(_lost, self.members[self.rank], self.members[rank])
        try:
            work = operation([torch.from_numpy(array.view(np.uint8))], rank, tag)
        except RuntimeError as error:
            raise failed() from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise failed() from error

        return wait

    def _nccl(self, like: Any) -> Any:
        """Return NCCL's process group if collectives of such arrays run on it; the first call is collective.

        Collectives with an empty part, of which all ranks know, go through the host: for DLPack, CuPy asks CUDA about
        the array's address, which may be null then, and NCCL refuses null pointers where NCCL_CHECK_POINTERS is set.
        """
        return None if isinstance(like, np.ndarray) else self.keep("nccl", lambda: self._connect_gpus(like.device.id))

    def _connect_gpus(self, device: int) -> Any:
        """Return a process group of NCCL; None if a rank lacks NCCL, uses it in another exchange, or shares its GPU."""
        family, usable = self._connection.family, distributed.is_nccl_available() and torch.cuda.is_available()
        with _choosing:
            usable = usable and os.environ.get(VARIABLE) != "0"
            usable = usable and not family.on_host and not set(_on_nccl) - {family}
            before = family in _on_nccl
            if usable:
                _on_nccl.add(family)
        gpus = self.allgather_object(str(torch.cuda.get_device_properties(device).uuid) if usable else None)
        if None in gpus or len(set(gpus)) < self.size:
            if not before:
                with _choosing:
                    _on_nccl.discard(family)
            return None
        store, kind = job().store(f"{self._connection.name}/nccl"), distributed.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = FOREVER  # by default, torch ends the process after ten minutes
        return kind(store, self.rank, self.size, options)

    # Groups and shared objects

    def channel(self) -> TorchTransport:
        """Return a transport of the same ranks over the same connection, with a separate traffic counter."""
        channel = TorchTransport(self._connection)
        channel._kept, channel._measured = self._kept, self._measured
        return channel

    def duplicate(self) -> TorchTransport:
        """Return a transport of the same ranks over a separate connection. A collective operation."""
        self._connection.parts += 1
        return self._connection.part(range(self.size))

    def split(self, node_ranks: int | None) -> Nodes:
        """Divide the ranks by node, for the first call of ``by_node``."""
        if node_ranks is None:
            nodes = self.allgather_object(_node())
        else:
            nodes = [rank // node_ranks for rank in range(self.size)]
        groups = [[rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)]
        own = next(group for group in groups if self.rank in group)
        number = own.index(self.rank)
        peers = [group[number] for group in groups if len(group) > number]
        self._connection.parts += 1
        of_node, of_peers = self._connection.part(own, f".{own[0]}"), self._connection.part(peers, f".number{number}")
        return Nodes([nodes.index(node) for node in nodes], of_node, of_peers)

    # Messages between control threads

    @property
    def members(self) -> list[int]:
        """World ranks of the group's members, by rank in the group."""
        return self._connection.members

    def avoid_nccl(self) -> None:
        """Let device arrays go through the host, also over connections that are derived from this one."""
        self._connection.family.on_host = True

    def mailboxes(self) -> TorchTransport:
        """Return a transport of the same mailboxes that is not connected."""
        return TorchTransport(_Connection(self.members, self._connection.name))

    def post(self, content: Any, rank: int, kind: int) -> None:
        """Put an object into a mailbox of a rank, without waiting for that rank."""
        job().mail.put(self._box(rank, kind), pickle.dumps((self.rank, content)))

    def poll(self, kind: int) -> list[tuple[int, Any]]:
        """Return source and content of each object that has arrived in a mailbox. Never blocks."""
        arrived = job().mail.take(self._box(self.rank, kind))
        return [pickle.loads(content) for content in arrived]  # noqa: S301 - from a rank of the same job

    def _box(self, rank: int, kind: int) -> str:
        return f"{self._connection.name}/{rank}/{kind}"


class _Message(NamedTuple):
    """Message in flight, in either direction."""

    waits: Sequence[Callable[[], None]]
    buffer: Buffer
    message: Array

    def wait(self) -> Any:
        for wait in self.waits:
            wait()
        self.buffer.close()
        return self.message


def _path(like: Any) -> Path:
    """Return the path to Gloo, which reaches host memory only."""
    return IN_PLACE if isinstance(like, np.ndarray) else staged()


def _nothing() -> None:
    """Wait for nothing."""


def _after(work: Any, parts: Sequence[Array]) -> Iterator[Array]:
    """Yield parts that are complete after an operation on the device."""
    work.wait()
    yield from parts


def _node() -> tuple[str, str]:
    """Return what all processes of a node, and no others, have in common; containers of a machine are nodes."""
    return File("/proc/sys/kernel/random/boot_id").read_text(), socket.gethostname()


def _lost(rank: int, other: int) -> RuntimeError:
    return RuntimeError(
        f"rank {rank}: rank {other} of {job().size} has closed its connection: it has left the program or died"
    )
