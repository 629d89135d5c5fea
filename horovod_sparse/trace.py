"""Spans of time per stage and bucket, as a table of totals or a Chrome trace that Perfetto opens.

Off until ``enable()`` is called; a span then costs about a microsecond, otherwise a tenth of it::

    from horovod_sparse import trace
    trace.enable()
    with trace.span("forward"):
        loss = model(batch)
    trace.export("trace.json", comm)

The pipeline records ``select`` (accumulate and select), ``agree``, ``exchange`` and ``apply`` per bucket, and marks the
``density`` in force and what a schedule weighed (``weigh``, with the gains); the optimizer records ``wait``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work.

    Attributes:
        name: The stage.
        start: Begin in ns since the epoch, by the monotonic clock.
        duration: Length in ns.
        thread: Name of the thread that did the work.
        details: What else is known, such as the bucket's number.
    """

    name: str
    start: int
    duration: int
    thread: str
    details: dict[str, Any]


_spans: list[Span] = []
recording = False
NOTHING = nullcontext()
# perf_counter has no defined zero; anchored to the epoch once, the ranks' spans line up as well as their clocks do.
_epoch = time.time_ns() - time.perf_counter_ns()


class _Recorder:
    __slots__ = ("_details", "_name", "_start")

    def __init__(self, name: str, details: dict[str, Any]) -> None:
        self._name = name
        self._details = details

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        duration = time.perf_counter_ns() - self._start
        thread = threading.current_thread().name
        _spans.append(Span(self._name, self._start + _epoch, duration, thread, self._details))


def enable(on: bool = True) -> None:
    """Starts (or with ``on=False`` stops) recording."""
    global recording
    recording = on


def span(name: str, **details: Any) -> AbstractContextManager[None]:
    """Records the time spent in a ``with`` block.

    Args:
        name: The stage.
        **details: Shown with the span, such as ``bucket=3``; JSON values.
    """
    return _Recorder(name, details) if recording else NOTHING


def mark(name: str, **details: Any) -> None:
    """Records a moment: a span of no length.

    Args:
        name: What happened.
        **details: Shown with it; JSON values.
    """
    if recording:
        now = time.perf_counter_ns() + _epoch
        _spans.append(Span(name, now, 0, threading.current_thread().name, details))


def spans() -> tuple[Span, ...]:
    """The spans recorded so far, in the order they ended."""
    return tuple(_spans)


def clear() -> None:
    """Forgets the spans recorded so far."""
    _spans.clear()


def totals() -> dict[str, float]:
    """Seconds per stage, summed over threads and buckets."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for recorded in spans():
        seconds[recorded.name] += recorded.duration / 1e9
    return dict(seconds)


def export(path: str | os.PathLike[str], comm: MPI.Intracomm | None = None) -> None:
    """Writes the spans as Chrome trace JSON, one process a rank and one track a thread.

    Args:
        path: File to write; written beside and renamed, so that a reader never sees half of it.
        comm: When given, a collective call: rank 0 writes the spans of all ranks. Otherwise this process' own.
    """
    ranks = [spans()] if comm is None else comm.gather(spans(), root=0)
    if ranks is None:
        return
    events = [event for rank, recorded in enumerate(ranks) for event in _events(rank, recorded)]
    target = Path(path)
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    beside.replace(target)


def _events(rank: int, recorded: tuple[Span, ...]) -> list[dict[str, Any]]:
    """One rank's spans as trace events; times in microseconds, as the format wants them."""
    threads = {name: number for number, name in enumerate(sorted({one.thread for one in recorded}))}
    names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    names += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
        for name, number in threads.items()
    ]
    return names + [
        {
            "ph": "X",
            "name": one.name,
            "pid": rank,
            "tid": threads[one.thread],
            "ts": one.start / 1e3,
            "dur": one.duration / 1e3,
            "args": one.details,
        }
        for one in recorded
    ]
