"""Messages, bytes and memory per rank of everything besides the exchange of gradients, by the number of ranks.

    python -m benchmarks.overheads --ranks 4 16 64 256

The ranks are threads. Calls of the transport are counted, as messages that the MPI transport makes of each: a gathering
that a rank waits for takes P - 1 messages up to 16 ranks and log2 P beyond, one that is begun always P - 1, sums and
broadcasts of the MPI library binomial trees. The table shows the rank that sends the most. Memory is the peak of what
Python and NumPy allocate, in the mean over the ranks; what MPI allocates is not in it. It needs no MPI.
"""

from __future__ import annotations

import logging
import pickle
import tempfile
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from torch import nn

import horovod_sparse as hvs
from benchmarks import command_line
from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.checkpoint.restore import read
from horovod_sparse.checkpoint.store import Snapshot, store
from horovod_sparse.control import link, watch
from horovod_sparse.control.report import Limits, Progress
from horovod_sparse.costs.measure import measure_link
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.engine.pipeline.agreement import Facts
from horovod_sparse.kernels.types import Array
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.doubling import DIRECT_RANKS
from horovod_sparse.transport.in_process import InProcessTransport, run_ranks
from horovod_sparse.transport.nodes import Nodes
from horovod_sparse.transport.traffic import RING_BYTES

_NODE_RANKS = 8
_PARAMETERS = tuple((f"layers.{number}.weight", (512, 512), "torch.float32") for number in range(300))
_SECONDS = 40  # of a stall, by a clock that the benchmark sets


class _Counts(threading.local):
    """Messages and bytes that the rank of this thread has sent."""

    messages = 0
    nbytes = 0

    def add(self, messages: int, nbytes: int) -> None:
        self.messages += messages
        self.nbytes += nbytes


_COUNTS = _Counts()


class Counting(InProcessTransport):
    """Transport that counts messages in ``_COUNTS``."""

    @property
    def _log(self) -> int:
        return (self.size - 1).bit_length()

    def _count_parts(self, lengths: Sequence[int]) -> None:
        direct = self.size <= DIRECT_RANKS or sum(lengths) >= RING_BYTES
        _COUNTS.add(self.size - 1 if direct else self._log, sum(lengths) - lengths[self.rank])

    def _send_all(self, messages: Iterable[Array], ranks: Sequence[int], like: Array) -> Any:
        contents = list(messages)
        _COUNTS.add(len(contents), sum(content.nbytes for content in contents))
        return super()._send_all(contents, ranks, like)

    def _swap(self, message: Array, starts: Sequence[int], lengths: Sequence[int], received: Array) -> Iterator[Array]:
        _COUNTS.add(self.size - 1, message.nbytes - lengths[self.rank])
        return super()._swap(message, starts, lengths, received)

    def _gather(self, gathered: Array, starts: Sequence[int], lengths: Sequence[int]) -> None:
        self._count_parts(lengths)
        super()._gather(gathered, starts, lengths)

    def _start_gather(self, rows: Array) -> Callable[[], None]:
        _COUNTS.add(self.size - 1, (self.size - 1) * rows[0].nbytes)
        return super()._start_gather(rows)

    def _broadcast(self, message: Array) -> None:
        _COUNTS.add(self._log, self._log * message.nbytes)
        super()._broadcast(message)

    def _start_sum(self, values: Array) -> Callable[[], None]:
        _COUNTS.add(2 * self._log, 2 * self._log * values.nbytes)
        return super()._start_sum(values)

    def barrier(self, pause: float = 0.0) -> None:
        """Wait until all ranks have called this method; ``pause`` is ignored."""
        _COUNTS.add(self._log, 0)
        super().barrier(pause)

    def split(self, node_ranks: int | None) -> Nodes:
        """Divide the ranks into nodes of eight, unless another number is given."""
        return super().split(node_ranks or _NODE_RANKS)

    def post(self, content: Any, rank: int, kind: int) -> None:
        """Put an object into a mailbox of a rank, without waiting for that rank."""
        _COUNTS.add(1, len(pickle.dumps(content)))
        super().post(content, rank, kind)


def _compare(transport: Counting) -> None:
    agree(transport, {"version": "1", "parameter": _PARAMETERS})


def _construct_bucket(transport: Counting) -> None:
    pipeline_for(hvs.parse("topka:density=0.01"), 100, np.empty(0, np.float32), transport)


def _agree_in_step(transport: Counting) -> None:
    transport.begin_allreduce(np.ones(len(Facts._fields), np.int64)).wait()  # of SparsePipeline


def _sum_of_rules(transport: Counting) -> None:
    transport.allreduce(np.ones(2))


def _number(transport: Counting) -> None:
    transport.allgather_integers(1)  # of Watch.add


CLOCK = SimpleNamespace(now=0)
CLOCK.monotonic = lambda: float(CLOCK.now)


class _Exchange:
    """Exchange that waits in its first bucket, unless its rank is missing."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def progress(self) -> Progress:
        return Progress(0, 0, self._stage)

    def leaves_at(self) -> tuple[int, int]:
        return 0, 0

    def names(self, bucket: int) -> Sequence[str]:
        del bucket
        return ["layers.0.weight"]


@contextmanager
def _clock(clock: SimpleNamespace) -> Iterator[None]:
    with mock.patch.object(watch, "time", clock), mock.patch.object(link, "time", clock):
        yield


def _stall(transport: Counting) -> None:
    """Let all ranks wait for one in the middle, until those that report have done so once."""
    process: Any = SimpleNamespace(job=SimpleNamespace(rank=transport.rank, size=transport.size), calls=())
    exchange = _Exchange("" if transport.rank == transport.size // 2 else "exchange")
    watching = watch.Watch(process)
    watching._exchanges[1] = watch._Exchange(weakref.ref(exchange), Limits(30.0, 0.0), link.Link(transport))
    for now in range(_SECONDS):
        if transport.rank == 0:
            CLOCK.now = now
        InProcessTransport.barrier(transport)
        watching._look()
        InProcessTransport.barrier(transport)


def _leave(transport: Counting) -> None:
    for _ in range(2):
        link.Link(transport).say_farewell(({1: (100, 0)}, ()))


def _checkpoint(load: bool, path: Path) -> Callable[[Counting], None]:
    def save(transport: Counting) -> None:
        own: dict[str, Any] = {"compression": None, "generators": {}, "buffers": {}, "data": {}, "shards": {}}
        shared: dict[str, Any] = {
            "model": {},
            "optimizer": {},
            "compression": None,
            "others": {},
            "layouts": [""] * transport.size,
        }
        snapshot = Snapshot(1, "token", own, {} if transport.rank else shared)
        store(transport, Folder(path), snapshot, 2, "")

    def save_and_load(transport: Counting) -> None:
        save(transport)
        _COUNTS.messages = _COUNTS.nbytes = 0
        manifest = Folder(path).choose(1, None)
        assert manifest is not None
        read(transport, Folder(path), manifest, nn.Module())

    return save_and_load if load else save


def _measure(transport: Counting) -> None:
    measure_link(transport)


class Cost(NamedTuple):
    """Cost of an operation per rank.

    Attributes:
        messages: Messages of the rank that sends the most.
        nbytes: Bytes of the rank that sends the most.
        mean: Mean number of messages.
        memory: Peak of the memory allocated, in bytes, in the mean over the ranks.
    """

    messages: int
    nbytes: int
    mean: float
    memory: float


def count(ranks: int, part: Callable[[Counting], object]) -> Cost:
    """Return what an operation costs on a number of ranks."""

    def program(transport: Any) -> tuple[int, int]:
        own = Counting(transport._threads, transport._group, transport.rank)
        transport.barrier()
        if transport.rank == 0:
            tracemalloc.start()
        transport.barrier()
        _COUNTS.messages = _COUNTS.nbytes = 0
        part(own)
        return _COUNTS.messages, _COUNTS.nbytes

    with _clock(CLOCK):
        try:
            sent = run_ranks(ranks, program)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    messages, nbytes = (np.array(column) for column in zip(*sent, strict=True))
    return Cost(int(messages.max()), int(nbytes.max()), float(messages.mean()), peak / ranks)


def parts(folder: Path) -> dict[str, Callable[[Counting], None]]:
    """Return what is counted, by name."""
    return {
        "comparison of arguments": _compare,
        "number of an exchange": _number,
        "construction of a bucket": _construct_bucket,
        "agreement of a step": _agree_in_step,
        "sum of a rule": _sum_of_rules,
        "report of a stall": _stall,
        "farewells": _leave,
        "save": _checkpoint(False, folder),
        "load": _checkpoint(True, folder),
        "measurement of the link": _measure,
    }


def main() -> None:
    """Count, and print a table in the form of docs/design.md."""
    parser = command_line("overheads", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256], help="world sizes")
    sizes = parser.parse_args().ranks
    logging.getLogger("horovod_sparse").setLevel(logging.ERROR)  # reports of the stall, saved checkpoints
    print("| messages; bytes; memory | " + " | ".join(map(str, sizes)) + " |")
    print("| --- |" + " ---: |" * len(sizes))
    for name in parts(Path()):
        row = []
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                cost = count(size, parts(Path(folder))[name])
            mean = "" if cost.mean > cost.messages / 2 else f" (mean {cost.mean:.1f})"
            row.append(f"{cost.messages}{mean}; {cost.nbytes}; {cost.memory / 1e3:.1f} k")
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
