"""Order of the accesses of two streams to the same memory, checked with vector clocks and without a GPU.

On a GPU, the work of two streams has no order but that of events. Where an event is missing, results are wrong once in
a while, or never on the machine at hand. Here every operation of torch and of the emulated CuPy notes which memory it
reads and writes on which stream. An access must come after the last conflicting one of the other stream: by a mark that
``work`` waits for, by ``follow``, or because the host has waited for that stream. The same is true of memory that is
freed, which the stream that has allocated it may use again at once.

Only torch's operations tell reading from writing; an array that CuPy or a kernel uses counts as written, a tensor that
torch.distributed sends as read. All of the script's streams are one here, also those of FSDP. What Horovod does is not
seen, nor what threads do outside of ``work``.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import cupy
import numpy as np
import pytest
import torch
from devices import EmulatedDevice
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CALLER, SIDE = 0, 1  # streams
_BLOCK = 4  # bytes; parts of a storage may belong to different gradients

# Numbers of operations of each stream that come before.
Clock = tuple[int, int]
Span = tuple[int, int]  # address and length in bytes


def latest(one: Clock, other: Clock) -> Clock:
    return max(one[0], other[0]), max(one[1], other[1])


class Mark(NamedTuple):
    """Point in the work of a stream."""

    stream: str
    clock: Clock


class Memory:
    """Memory of one allocation, with the numbers of the last operations of each stream that have used its blocks."""

    def __init__(self, owner: Any, begin: int, length: int, stream: int, what: str) -> None:
        self.owner = weakref.ref(owner)
        self.begin, self.stream, self.what = begin, stream, what
        self.end = begin + length
        self.used, self.written = np.zeros((2, 2, -(-length // _BLOCK)), np.int64)

    @property
    def lives(self) -> bool:
        """False once the memory was freed; FSDP keeps storages whose memory it frees."""
        owner = self.owner()
        if isinstance(owner, torch.UntypedStorage):
            return owner.data_ptr() == self.begin and owner.nbytes() >= self.end - self.begin
        return owner is not None

    def blocks(self, begin: int, length: int) -> slice:
        """Return the blocks of a part."""
        return slice((begin - self.begin) // _BLOCK, -(-(begin - self.begin + length) // _BLOCK))


class StreamOrder(EmulatedDevice):
    """Device that finds accesses without an order.

    Attributes:
        known: Number of accesses to memory that is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known = 0
        self._races: list[str] = []
        # Freed memory, with what its stream came after then, and what any thread had waited for.
        self._dead: deque[tuple[Memory, Clock, Clock]] = deque()
        self._lock = threading.RLock()
        self._streams: list[Clock] = [(0, 0), (0, 0)]
        self._seen_by_any: Clock = (0, 0)
        self._memory: dict[int, Memory] = {}  # by its first address
        self._begins: list[int] = []
        self._storages: dict[int, Any] = {}  # of torch, by address

    @property
    def operations(self) -> Clock:
        """Numbers of operations of each stream."""
        return self._streams[CALLER][CALLER], self._streams[SIDE][SIDE]

    @property
    def races(self) -> list[str]:
        """Descriptions of what was found."""
        with self._lock:
            self._bury()
        return self._races

    # --- the order ---

    @property
    def _current(self) -> int:
        return SIDE if self.inside else CALLER

    @property
    def _seen(self) -> Clock:
        """What this thread has waited for."""
        clock: Clock = getattr(self._thread, "seen", (0, 0))
        return clock

    def host_waits(self) -> None:
        """Note that this thread waits for its current stream."""
        with self._lock:
            self._thread.seen = latest(self._seen, self._streams[self._current])
            self._seen_by_any = latest(self._seen_by_any, self._thread.seen)

    def mark(self, stream: Any) -> Any:
        super().mark(stream)
        with self._lock:
            return Mark(stream, self._streams[SIDE if stream == "side" else CALLER])

    @contextmanager
    def work(self, after: Iterable[Any] = ()) -> Iterator[None]:
        marks = list(after)
        # The transfers of local steps mark the side stream, too.
        with super().work([mark.stream for mark in marks if mark.stream != "side"]):
            with self._lock:
                for mark in marks:
                    self._streams[SIDE] = latest(self._streams[SIDE], mark.clock)
            with self.noted():
                yield

    def follow(self) -> None:
        if self.inside:  # the transfers of local steps run as a whole on the side stream
            return
        super().follow()
        with self._lock:
            self._streams[CALLER] = latest(self._streams[CALLER], self._streams[SIDE])

    def resolved(self) -> None:
        """Note that a future gets its result, for whose stream the script's waits.

        It does so when DDP takes the result, of which nothing is known here: races before are not found.
        """
        with self._lock:
            self._streams[CALLER] = latest(self._streams[CALLER], self._streams[self._current])

    # --- accesses ---

    def access(self, reads: Iterable[Span], writes: Iterable[Span], what: str) -> None:
        """Note an operation on the current stream, with the memory that it reads and writes."""
        with self._lock:
            self._bury()
            stream, other = self._current, 1 - self._current
            before = latest(self._streams[stream], self._seen)
            number = before[stream] + 1
            self._streams[stream] = (number, before[1]) if stream == CALLER else (before[0], number)
            for spans, does in ((reads, "reads"), (writes, "writes")):
                for begin, length in spans:
                    memory = self._memory_at(begin, length)
                    if memory is None:
                        continue
                    self.known += 1
                    part = memory.blocks(begin, length)
                    conflicting = memory.used if does == "writes" else memory.written
                    if conflicting[other, part].max(initial=0) > before[other]:
                        self._found(f"{what} {does} {memory.what}, which the other stream may still use")
                    memory.used[stream, part] = number
                    if does == "writes":
                        memory.written[stream, part] = number

    def _memory_at(self, begin: int, length: int) -> Memory | None:
        place = bisect_right(self._begins, begin) - 1
        if place < 0 or not length:
            return None
        memory = self._memory[self._begins[place]]
        return memory if begin + length <= memory.end else None

    def allocated(self, owner: Any, begin: int, length: int, what: str) -> None:
        """Note new memory; it is freed when its owner is."""
        with self._lock:
            self._bury()
            first = max(bisect_right(self._begins, begin) - 1, 0)
            for old in self._begins[first : bisect_left(self._begins, begin + length)]:
                memory = self._memory[old]
                if memory.end <= begin:
                    continue
                if memory.lives and memory.begin <= begin and begin + length <= memory.end:
                    return  # a view of it
                self._forget(memory)
            memory = self._memory[begin] = Memory(owner, begin, length, self._current, what)
            insort(self._begins, begin)
            weakref.finalize(owner, self._freed, memory).atexit = False

    def _forget(self, memory: Memory) -> None:
        if self._memory.get(memory.begin) is memory:
            del self._memory[memory.begin]
            del self._begins[bisect_left(self._begins, memory.begin)]

    def _freed(self, memory: Memory) -> None:
        """Note that the stream that has allocated memory may use it again.

        Runs at any point of any thread: it waits for no lock, and changes no table.
        """
        self._dead.append((memory, self._streams[memory.stream], self._seen_by_any))

    def _bury(self) -> None:
        """Check the memory that was freed.

        What any thread had waited for counts, as the thread with the last reference is not known: the others have
        dropped theirs before.
        """
        while self._dead:
            memory, own, seen = self._dead.popleft()
            other = 1 - memory.stream
            self._forget(memory)
            if memory.used[other].max(initial=0) > latest(own, seen)[other]:
                self._found(f"{memory.what} is freed, while the other stream may still use it")

    def _found(self, what: str) -> None:
        stack = [line for line in traceback.format_stack() if "horovod_sparse/" in line][-4:]
        stream = "the exchange's" if self.inside else "the script's"
        self._races.append(f"on {stream} stream: {what}\n{''.join(stack)}")

    def array_of(self, tensor: torch.Tensor) -> Any:
        self.storage(tensor)
        return super().array_of(tensor)

    def storage(self, tensor: torch.Tensor) -> None:
        """Note the memory of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage.data_ptr())
        if storage.nbytes() and (known is None or known() is not storage):
            self._storages[storage.data_ptr()] = weakref.ref(storage)
            self.allocated(
                storage, storage.data_ptr(), storage.nbytes(), f"memory of a tensor of {tuple(tensor.shape)}"
            )

    # --- what notes them ---

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note torch's operations of this thread in the block."""
        if getattr(self._thread, "noting", False):
            yield
            return
        self._thread.noting = True
        try:
            with _Operations(self):
                yield
        finally:
            self._thread.noting = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note everything that this thread, and the device's work on any thread, does in the block."""
        array, order, copy, allocate, count = cupy.ndarray, self, cupy._stream.copy, cupy._allocate, cupy._count
        host = array._host

        def accessed(one: Any) -> Any:
            order.access((), [_extent_of(one._array)], "CuPy")
            return host.fget(one)

        def copied(target: Any, source: Any, host: Any) -> None:
            order.access((), [_extent_of(target if source is host else source)], "a copy")
            copy(target, source, host)

        def allocated(shape: Any, kind: Any) -> Any:
            result = allocate(shape, kind)
            order.allocated(result.base, result.base.ctypes.data, result.base.nbytes, f"an array of {result.shape}")
            return result

        def counted(what: str) -> None:
            order.host_waits()
            count(what)

        def reading(name: str) -> Any:
            original = getattr(torch.Tensor, name)

            def read(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
                for one in _tensors(tensor):  # no operation of torch's, as the tensor is on the host in truth
                    order.storage(one)
                    order.access([_span(one)], (), name)
                    order.host_waits()
                return original(tensor, *given, **named)

            return read

        set_result = torch.futures.Future.set_result

        def resolved(future: Any, result: Any) -> None:
            order.resolved()
            set_result(future, result)

        with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            for name in ("cpu", "numpy", "tolist"):
                patch.setattr(torch.Tensor, name, reading(name))
            patch.setattr(torch.futures.Future, "set_result", resolved)
            patch.setattr(array, "_host", property(accessed, host.fset))
            patch.setattr(cupy._stream, "copy", copied)
            patch.setattr(cupy, "_allocate", allocated)
            patch.setattr(cupy, "_count", counted)
            stack.enter_context(self.noted())
            yield


def _extent_of(array: np.ndarray[Any, Any]) -> Span:
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data,) * 2
    return low, high - low


class _Operations(TorchDispatchMode):
    """Notes what torch's operations read and write."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        reads, writes = [], []
        for argument, value in [
            *zip(operation._schema.arguments, args, strict=False),
            *((one, given[one.name]) for one in operation._schema.arguments if one.name in given),
        ]:
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(_tensors(value))
        for tensor in [*reads, *writes]:
            self._order.storage(tensor)
        before = {id(one.untyped_storage()) for one in [*reads, *writes]}
        result = operation(*args, **given)
        if operation.is_view:
            return result
        made = [one for one in _tensors(result) if id(one.untyped_storage()) not in before]
        for tensor in made:
            self._order.storage(tensor)
        self._order.access(map(_span, reads), map(_span, [*writes, *made]), str(operation))
        if "_local_scalar_dense" in str(operation):
            self._order.host_waits()
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = [one._local_tensor if isinstance(one, DTensor) else one for one in tree_leaves(value)]
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.layout == torch.strided]


def _span(tensor: torch.Tensor) -> Span:
    if not tensor.numel():
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.itemsize
