"""Transport between threads of one process, for tests and for simulating many ranks on one machine."""

from __future__ import annotations

import pickle
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from horovod_sparse.kernels.types import Array
from horovod_sparse.transport.base import Receiving, Sending, Transport
from horovod_sparse.transport.nodes import Nodes

T = TypeVar("T")

_POLL = 0.05  # seconds between checks for failed ranks


class RankFailedError(RuntimeError):
    """Another rank raised an exception, or ended without taking part in an operation."""


class _Group:
    """State shared by the ranks of a group, with the thread numbers ``members``."""

    def __init__(self, members: list[int], threads: _Threads) -> None:
        self.members = members
        # Created here: two threads that meet at a missing key of a defaultdict may each create a queue.
        ranks = range(len(members))
        self.messages = {(source, rank): queue.SimpleQueue[Array]() for source in ranks for rank in ranks}
        self.posts: dict[tuple[int, int], queue.SimpleQueue[tuple[int, bytes]]] = {}
        self._threads = threads
        self._changed = threading.Condition()
        self._started = [0] * len(members)  # operations of each rank
        self._arrived: dict[int, list[tuple[int, Any]]] = {}  # rank and item, by number of the operation
        self._read = Counter[int]()  # ranks that have the result, by number of the operation

    def start(self, rank: int, item: Any) -> Callable[[], list[Any]]:
        """Start an operation; return what waits until all ranks have started it, and returns their items in rank order.

        A rank's n-th operation belongs to the n-th of every other rank, whatever they wait for first.
        """
        with self._changed:
            number = self._started[rank]
            self._started[rank] += 1
            arrived = self._arrived.setdefault(number, [])
            arrived.append((rank, item))
            if len(arrived) == len(self.members):
                self._changed.notify_all()
        return partial(self._result, number)

    def _result(self, number: int) -> list[Any]:
        with self._changed:
            arrived = self._arrived[number]

            def missing() -> set[int]:
                return {*range(len(self.members))} - {rank for rank, _ in arrived}

            # Ranks that have taken part may have ended since.
            self._changed.wait_for(lambda: len(arrived) == len(self.members) or self.ended(missing()) is not None)
            if len(arrived) < len(self.members):
                raise self.failure(missing())
            self._read[number] += 1
            if self._read[number] == len(self.members):
                del self._arrived[number], self._read[number]
        return [theirs for _, theirs in sorted(arrived, key=lambda pair: pair[0])]

    def ended(self, ranks: Iterable[int]) -> int | None:
        """Return the first member among ranks whose thread has ended; None: all are running."""
        members = [self.members[rank] for rank in sorted(ranks)]
        return next((member for member in members if member in self._threads.ended), None)

    def failure(self, ranks: Iterable[int]) -> RankFailedError:
        """Return an error that names a member among ranks whose thread has ended."""
        member = self.ended(ranks)
        assert member is not None
        error = self._threads.ended[member]
        return RankFailedError(f"thread {member} has ended" + (f" with {error!r}" if error else ""))

    def notify(self) -> None:
        """Wake waiting ranks, so that they check for members that have ended."""
        with self._changed:
            self._changed.notify_all()


class _Threads:
    """All threads of one ``run_ranks``.

    Attributes:
        ended: Errors of ended threads by thread number, in the order of ending; None: no error.
    """

    def __init__(self) -> None:
        self.ended: dict[int, BaseException | None] = {}
        self._groups: list[_Group] = []

    def group(self, members: list[int]) -> _Group:
        """Create a group of threads."""
        group = _Group(members, self)
        self._groups.append(group)
        return group

    def end(self, member: int, error: BaseException | None = None) -> None:
        """Record that a thread has ended, and wake the ranks that wait."""
        self.ended[member] = error
        for group in list(self._groups):
            group.notify()


class InProcessTransport(Transport):
    """Transport between threads; created by ``run_ranks``."""

    def __init__(self, threads: _Threads, group: _Group, rank: int) -> None:
        super().__init__(rank, len(group.members), None)
        self._threads = threads
        self._group = group

    def _start(self, operation: str, item: Any, use: Callable[[list[Any]], Any] = list) -> Callable[[], Any]:
        """Start an operation; return what waits for all ranks' items and uses them.

        It raises if a rank is in another operation.
        """
        wait = self._group.start(self.rank, (operation, item))

        def finish() -> Any:
            everyones = wait()
            for rank, (theirs, _) in enumerate(everyones):
                if theirs != operation:
                    raise RuntimeError(f"rank {self.rank} is in {operation}, but rank {rank} is in {theirs}")
            return use([theirs for _, theirs in everyones])

        return finish

    # Operations on arrays

    def _send_all(self, messages: Iterable[Array], ranks: Sequence[int], like: Array) -> list[Sending]:
        del like
        for message, rank in zip(messages, ranks, strict=True):
            self._group.messages[self.rank, rank].put(message.copy())
        return [_Done()] * len(ranks)

    def _receive(self, rank: int, like: Array) -> tuple[int, Receiving]:
        del like
        arrived = self._group.messages[rank, self.rank]
        message = None
        while message is None:
            with suppress(queue.Empty):
                message = arrived.get(timeout=_POLL)
            if message is None and self._group.ended([rank]) is not None and arrived.empty():
                raise self._group.failure([rank])
        return message.nbytes, _Done(message)

    def _swap(self, message: Array, starts: Sequence[int], lengths: Sequence[int], received: Array) -> Iterator[Array]:
        del received
        start, end = starts[self.rank], starts[self.rank] + lengths[self.rank]
        wait = self._start("a sum", message.copy())

        def parts() -> Iterator[Array]:
            yield from (theirs[start:end] for theirs in wait())

        return parts()

    def _gather(self, gathered: Array, starts: Sequence[int], lengths: Sequence[int]) -> None:
        parts = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        everyones = self._start("an allgather", gathered[parts[self.rank]].copy())()
        for rank, part in enumerate(parts):
            gathered[part] = everyones[rank]

    def _start_gather(self, rows: Array) -> Callable[[], None]:
        return self._start("an allgather", rows[self.rank].copy(), lambda everyones: np.copyto(rows, everyones))

    def _broadcast(self, message: Array) -> None:
        message[:] = self._start("a broadcast", message.copy() if self.rank == 0 else None)()[0]

    def _start_sum(self, values: Array) -> Callable[[], None]:
        return self._start("a sum", values.copy(), lambda everyones: np.copyto(values, sum(everyones)))

    def barrier(self, pause: float = 0.0) -> None:
        """Wait until all ranks have called this method; ``pause`` is ignored."""
        del pause
        self._start("a barrier", None)()

    # Groups and shared objects

    def channel(self) -> InProcessTransport:
        """Return a transport of the same ranks over the same queues, with a separate traffic counter."""
        channel = type(self)(self._threads, self._group, self.rank)
        channel._kept, channel._measured = self._kept, self._measured
        return channel

    def duplicate(self) -> InProcessTransport:
        """Return a transport of the same ranks over separate queues. A collective operation."""
        return self._regroup(range(self.size))

    def _regroup(self, ranks: Sequence[int]) -> InProcessTransport:
        """Return a transport of ``ranks``, which include this one. All ranks call this, each with its own subset."""
        members = [self.members[rank] for rank in ranks]
        group = self._threads.group(members) if ranks[0] == self.rank else None
        groups = self._start("a split", group)()
        return type(self)(self._threads, groups[ranks[0]], list(ranks).index(self.rank))

    def split(self, node_ranks: int | None) -> Nodes:
        """Divide the ranks by node, for the first call of ``by_node``."""
        node_ranks = node_ranks or self.size
        first = self.rank - self.rank % node_ranks
        own = self._regroup(range(first, min(first + node_ranks, self.size)))
        peers = self._regroup(range(own.rank, self.size, node_ranks))
        return Nodes([rank - rank % node_ranks for rank in range(self.size)], own, peers)

    # Messages between control threads

    @property
    def members(self) -> list[int]:
        """Thread numbers of the group's members, by rank in the group."""
        return self._group.members

    def _mailbox(self, rank: int, kind: int) -> queue.SimpleQueue[tuple[int, bytes]]:
        return self._group.posts.setdefault((rank, kind), queue.SimpleQueue())  # atomic

    def post(self, content: Any, rank: int, kind: int) -> None:
        """Put an object into a mailbox of a rank, without waiting for that rank."""
        self._mailbox(rank, kind).put((self.rank, pickle.dumps(content)))

    def poll(self, kind: int) -> list[tuple[int, Any]]:
        """Return source and content of each object that has arrived in a mailbox. Never blocks."""
        posts, arrived = self._mailbox(self.rank, kind), []
        while not posts.empty():
            source, content = posts.get()
            arrived.append((source, pickle.loads(content)))  # noqa: S301 - from this process
        return arrived


class _Done(NamedTuple):
    """Message that has arrived, or was copied when it was sent."""

    message: Any = None

    def wait(self) -> Any:
        return self.message


def run_ranks(size: int, program: Callable[[Transport], T]) -> list[T]:
    """Run a program on threads that are the ranks of one group, and return its result on each rank.

    Raises:
        BaseException: The error of the first rank that failed. Ranks that wait for it then raise ``RankFailedError``,
            and so do those that wait for these.
    """
    threads = _Threads()
    group = threads.group(list(range(size)))
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = program(InProcessTransport(threads, group, rank))
        except BaseException as error:
            threads.end(rank, error)
        else:
            threads.end(rank)

    if size == 1:
        run(0)  # on the caller's thread, for debuggers
    else:
        ranks = [threading.Thread(target=run, args=[rank], name=f"rank {rank}", daemon=True) for rank in range(size)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
    errors = [error for error in threads.ended.values() if error is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, RankFailedError))
    return [results[rank] for rank in range(size)]
