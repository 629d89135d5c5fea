"""Transport over MPI (mpi4py)."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from horovod_sparse.kernels.scratch import SCRATCH
from horovod_sparse.kernels.types import Array
from horovod_sparse.transport import doubling
from horovod_sparse.transport.base import Receiving, Sending, Transport
from horovod_sparse.transport.nodes import ONE_NODE, Nodes
from horovod_sparse.transport.staging import CUDA_AWARE, IN_PLACE, Buffer, Path, path_for, staged
from horovod_sparse.transport.traffic import RING_BYTES
from horovod_sparse.transport.waiting import Waiting, keep_alive

# Messages are sent in pieces of this many bytes, all in flight together. From 64 KiB on, Open MPI's TCP asks the
# receiver before it sends, and then moves data between two ranks in one direction at a time. If all ranks share memory,
# larger pieces take a third less time.
PIECE_BYTES = 60 << 10
SHARED_MEMORY_PIECE_BYTES = 1 << 20
# Tags: first pieces of messages; lengths of messages that fill their first piece; further pieces; parts of a sum; of a
# gathering.
_MESSAGE, _LENGTH, _PIECE, _PART, _DOUBLED = 1, 3, 4, 5, 6
_POSTS = 32758  # first of ten tags, one per mailbox; every MPI allows tags up to 32767


class MPIJob:
    """Job of all ranks of ``MPI.COMM_WORLD``."""

    def __init__(self) -> None:
        self.rank: int = MPI.COMM_WORLD.Get_rank()
        self.size: int = MPI.COMM_WORLD.Get_size()

    @property
    def finalized(self) -> bool:
        """True after MPI has been finalized."""
        return MPI.Is_finalized()

    def on_finalize(self, call: Callable[[], None]) -> None:
        """Register a function with MPI_Finalize, which first deletes the attributes of ``MPI.COMM_SELF``."""
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: call()), "horovod_sparse uses MPI")

    def abort(self) -> None:
        """End all ranks."""
        MPI.COMM_WORLD.Abort(1)


@functools.cache
def job() -> MPIJob:
    """Return the job that this process belongs to."""
    return MPIJob()


def require_launcher() -> None:
    """Check that MPI knows all processes of the job.

    Raises:
        RuntimeError: This process was started as one of several, but MPI has a single rank: each would train alone.
    """
    if job().size > 1:
        return
    for variable in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        started = os.environ.get(variable, "")
        if started.isdigit() and int(started) > 1:
            raise RuntimeError(
                f"{variable}={started} says that several processes were started, but MPI knows only this one: start "
                "the program with mpirun or srun --mpi=pmix (`srun --mpi=list` shows the choices), or train with "
                "hvs.ddp under torchrun"
            )


class MPITransport(Transport):
    """Transport over an MPI communicator.

    Args:
        comm: Communicator whose messages this transport and its channels receive.
        waiting: How this rank waits; shared with the transport that this one is made from, if any.

    Attributes:
        comm: Communicator of the ranks.
    """

    waiting: Waiting

    def __init__(self, comm: MPI.Intracomm, waiting: Waiting | None = None) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), job())
        self.comm = comm
        self.waiting = waiting or Waiting()
        self._posts: list[MPI.Request] = []
        self._all_aware: bool | None = None  # None until the first collective on a device array

    # Operations on arrays

    def _send_all(self, messages: Iterable[Array], ranks: Sequence[int], like: Array) -> list[Sending]:
        buffers = path_for(like).outgoing(messages)
        return [self._send(buffer, rank) for buffer, rank in zip(buffers, ranks, strict=True)]

    def _send(self, buffer: Buffer, rank: int) -> Sending:
        nbytes = buffer.array.nbytes
        first, *others = self._pieces(buffer.array)
        requests = [self.comm.Isend([first, MPI.BYTE], rank, _MESSAGE)]
        if nbytes >= self._piece_bytes:
            requests.append(self.comm.Isend(np.array([nbytes], np.int64), rank, _LENGTH))
            requests += [self.comm.Isend([piece, MPI.BYTE], rank, _PIECE) for piece in others]
        return _Sending(partial(self._complete, requests), buffer)

    def _receive(self, rank: int, like: Array) -> tuple[int, Receiving]:
        status = MPI.Status()
        origin = (rank, _MESSAGE, status)
        incoming = self.waiting.wait(partial(self.comm.Improbe, *origin), partial(self.comm.Mprobe, *origin))
        assert incoming is not None
        length = np.array([status.Get_count(MPI.BYTE)], np.int64)
        if length[0] == self._piece_bytes:  # more pieces may follow
            self._complete([self.comm.Irecv(length, rank, _LENGTH)])
        message = SCRATCH.empty(int(length[0]), like, np.uint8)
        (buffer,) = path_for(like).incoming([message])
        first, *others = self._pieces(buffer.array)
        requests = [incoming.Irecv([first, MPI.BYTE])]
        requests += [self.comm.Irecv([piece, MPI.BYTE], rank, _PIECE) for piece in others]
        return message.nbytes, _Receiving(partial(self._complete, requests), buffer, message)

    def _swap(self, message: Array, starts: Sequence[int], lengths: Sequence[int], received: Array) -> Iterator[Array]:
        short, own = message.nbytes < RING_BYTES, lengths[self.rank]
        path = self._common_path(message) if short else path_for(message)
        (leaving,), (arriving,) = path.outgoing([message]), path.incoming([received])
        sends: list[MPI.Request] = []
        receives: list[list[MPI.Request]] = [[] for _ in lengths]
        if short:
            counts = [own] * self.size
            offsets = [own * rank for rank in range(self.size)]
            sent = [leaving.array, lengths, starts, MPI.BYTE]
            receives[0].append(self.comm.Ialltoallv(sent, [arriving.array, counts, offsets, MPI.BYTE]))
        else:
            arriving.array[own * self.rank : own * (self.rank + 1)] = leaving.array[starts[self.rank] :][:own]
            for distance in range(1, self.size):  # all ranks start with different destinations
                to, origin = (self.rank + distance) % self.size, (self.rank - distance) % self.size
                for piece in self._pieces(arriving.array[own * origin : own * (origin + 1)]):
                    receives[origin].append(self.comm.Irecv([piece, MPI.BYTE], origin, _PART))
                pieces = self._pieces(leaving.array[starts[to] :][: lengths[to]])
                sends += [self.comm.Isend([piece, MPI.BYTE], to, _PART) for piece in pieces]

        def parts() -> Iterator[Array]:
            nonlocal receives
            if arriving.array is not received:  # staged: one copy to the device after all parts have arrived
                self._complete(list(itertools.chain(*receives)))
                receives = [[] for _ in lengths]
            arriving.close()
            try:
                for rank, requests in enumerate(receives):
                    self._complete(requests)
                    yield received[own * rank : own * (rank + 1)]
                self._complete(sends)
            except BaseException:
                keep_alive([partial(MPI.Request.Testall, [*itertools.chain(*receives), *sends])])
                raise
            leaving.close()

        return parts()

    def _gather(self, gathered: Array, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Gather over a ring from ``RING_BYTES`` on: on Ethernet 30 % less time than Open MPI's algorithm."""
        if sum(lengths) >= RING_BYTES:
            self._gather_around_ring(
                [gathered[start : start + length] for start, length in zip(starts, lengths, strict=True)]
            )
            return
        path = self._common_path(gathered)
        if path is IN_PLACE and self.size > doubling.DIRECT_RANKS:  # Open MPI's algorithm takes P - 1 messages
            parts = [gathered[start : start + length] for start, length in zip(starts, lengths, strict=True)]
            doubling.gather_by_doubling(parts, self.rank, self._trade)
            return
        if path is IN_PLACE:
            self._complete([self.comm.Iallgatherv(MPI.IN_PLACE, [gathered, lengths, starts, MPI.BYTE])])
            return
        begin, end = starts[self.rank], starts[self.rank] + lengths[self.rank]
        (own,), (target,) = path.outgoing([gathered[begin:end]]), path.incoming([gathered])
        if target.array is not gathered:
            target.array[begin:end] = own.array
        self._complete([self.comm.Iallgatherv(MPI.IN_PLACE, [target.array, lengths, starts, MPI.BYTE])])
        target.close()
        own.close()

    def _trade(self, sent: Array, to: int, received: Array, origin: int) -> None:
        """Send a host array of any length to a rank, and receive one from another."""
        arrives = self.comm.Irecv([received, MPI.BYTE], origin, _DOUBLED)
        self._complete([arrives, self.comm.Isend([sent, MPI.BYTE], to, _DOUBLED)])

    def _gather_around_ring(self, parts: Sequence[Array]) -> None:
        """Forward the parts from the left to the right neighbor in size - 1 steps."""
        path = path_for(parts[self.rank])
        (own,) = path.outgoing([parts[self.rank]])
        buffers = {self.rank: own}
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for step in range(self.size - 1):
            outgoing, incoming = (self.rank - step) % self.size, (left - step) % self.size
            (buffers[incoming],) = path.incoming([parts[incoming]])
            receives = [
                self.comm.Irecv([piece, MPI.BYTE], left, _PIECE) for piece in self._pieces(buffers[incoming].array)
            ]
            sends = [
                self.comm.Isend([piece, MPI.BYTE], right, _PIECE) for piece in self._pieces(buffers[outgoing].array)
            ]
            self._complete(receives + sends)
        for buffer in buffers.values():
            buffer.close()

    def _start_gather(self, rows: Array) -> Callable[[], None]:
        return partial(self._complete, [self.comm.Iallgather(MPI.IN_PLACE, rows)])

    def _broadcast(self, message: Array) -> None:
        path = self._common_path(message)
        (buffer,) = path.outgoing([message]) if self.rank == 0 else path.incoming([message])
        self._complete([self.comm.Ibcast([buffer.array, MPI.BYTE])])
        buffer.close()

    def _start_sum(self, values: Array) -> Callable[[], None]:
        return partial(self._complete, [self.comm.Iallreduce(MPI.IN_PLACE, values)])

    def barrier(self, pause: float = 0.0) -> None:
        """Wait until all ranks have called this method, sleeping ``pause`` seconds between checks."""
        self._complete([self.comm.Ibarrier()], pause)

    def _complete(self, requests: Sequence[MPI.Request], pause: float = 0.0) -> None:
        """Wait until all requests are complete."""
        if not (pause or self.waiting.sleeps):
            self.waiting.wait(partial(MPI.Request.Testall, requests), partial(MPI.Request.Waitall, requests))
            return
        # One after the other: a test of all takes time for each, while a test of one moves the messages of all. And
        # pauses begin short again after each, as the next piece of a message is near.
        try:
            for request in requests:
                self.waiting.wait(request.Test, request.Wait, pause)
        except BaseException:
            keep_alive([partial(MPI.Request.Testall, requests)])
            raise

    def _common_path(self, like: Any) -> Path:
        """Return the path that all ranks take in collectives of the MPI library."""
        if isinstance(like, np.ndarray):
            return IN_PLACE
        own = path_for(like)
        if self._all_aware is None:
            aware = np.array([own is CUDA_AWARE], np.int64)
            self._start_sum(aware)()
            self._all_aware = bool(aware[0] == self.size)
        return CUDA_AWARE if self._all_aware else staged()

    @property
    def _piece_bytes(self) -> int:
        # The same on all ranks, as `by_node` is a collective operation.
        return SHARED_MEMORY_PIECE_BYTES if self._kept.get(ONE_NODE) else PIECE_BYTES

    def _pieces(self, message: Array) -> list[Array]:
        """Split a message into pieces; the last may be shorter. An empty message is one piece."""
        length = self._piece_bytes
        if message.nbytes <= length:
            return [message]
        return [message[start : start + length] for start in range(0, message.nbytes, length)]

    # Groups and shared objects

    def channel(self) -> MPITransport:
        """Return a transport of the same ranks over the same communicator, with a separate traffic counter."""
        channel = MPITransport(self.comm, self.waiting)
        channel._kept, channel._measured, channel._posts = self._kept, self._measured, self._posts
        return channel

    def duplicate(self) -> MPITransport:
        """Return a transport of the same ranks over a duplicate communicator. A collective operation."""
        return MPITransport(self.comm.Dup(), self.waiting)

    def split(self, node_ranks: int | None) -> Nodes:
        """Divide the ranks by node, for the first call of ``by_node``."""
        comm: Any = self.comm
        own = comm.Split_type(MPI.COMM_TYPE_SHARED) if node_ranks is None else comm.Split(self.rank // node_ranks)
        peers = comm.Split(own.Get_rank())
        firsts = comm.allgather(own.bcast(self.rank))
        return Nodes(firsts, MPITransport(own, self.waiting), MPITransport(peers, self.waiting))

    # Messages between control threads

    @property
    def members(self) -> list[int]:
        """World ranks of the group's members, by rank in the group."""
        members: list[int] = self.keep("members", lambda: world_ranks(self.comm))
        return members

    def post(self, content: Any, rank: int, kind: int) -> None:
        """Send an object to the control thread of a rank, without waiting for that rank: it may be stopped."""
        self._posts[:] = [request for request in self._posts if not request.Test()]
        self._posts.append(self.comm.isend(content, rank, _POSTS + kind))

    def poll(self, kind: int) -> list[tuple[int, Any]]:
        """Return source and content of each object that has arrived in a mailbox. Never blocks."""
        arrived, status = [], MPI.Status()
        # Matched probes: another thread may poll at the same time.
        while (message := self.comm.improbe(MPI.ANY_SOURCE, _POSTS + kind, status)) is not None:
            arrived.append((status.Get_source(), message.recv()))
        return arrived


class _Sending(NamedTuple):
    complete: Callable[[], None]
    buffer: Buffer

    def wait(self) -> None:
        self.complete()
        self.buffer.close()


class _Receiving(NamedTuple):
    complete: Callable[[], None]
    buffer: Buffer
    message: Array

    def wait(self) -> Array:
        self.complete()
        self.buffer.close()
        return self.message


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of a communicator's members in ``MPI.COMM_WORLD``, by rank in the communicator."""
    return comm.Get_group().Translate_ranks(None, MPI.COMM_WORLD.Get_group())
