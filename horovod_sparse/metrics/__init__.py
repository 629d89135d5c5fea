"""Time spans per stage and bucket, as a table of totals or a Chrome trace for Perfetto.

Recording is off until ``enable()`` is called. A span costs about a microsecond with recording on, less with it off::

    from horovod_sparse import metrics
    metrics.enable()
    with metrics.span("forward"):
        loss = model(batch)
    metrics.export("trace.json", comm)

The pipeline records ``select`` (accumulate and select), ``agree``, ``exchange`` and ``apply`` per bucket. It also
marks the current ``density``, and the gains that a schedule compared (``weigh``). The optimizer records ``wait``.

A GPU is still working when the host leaves the block. With ``enable(device=torch.cuda)``, spans measure device time
instead: from when this thread's current stream reaches the block until it has completed the work launched there. Spans
never wait for the device; ``spans``, ``totals``, ``export``, ``clear`` and ``enable`` do.

While torch's profiler is on, or a tool records NVTX, spans are also ranges there. ``Log`` and ``TextFile`` write the
results of ``optimizer.statistics()`` to files.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from horovod_sparse.metrics import ranges
from horovod_sparse.metrics.chrome import Span, write
from horovod_sparse.metrics.device import Device, DeviceTime
from horovod_sparse.metrics.log import Log
from horovod_sparse.metrics.prometheus import TextFile

__all__ = [
    "Device",
    "Log",
    "Span",
    "TextFile",
    "active",
    "clear",
    "enable",
    "export",
    "mark",
    "recording",
    "span",
    "spans",
    "totals",
]

_spans: list[Span] = []
recording = False
_NOTHING = nullcontext()
# perf_counter has no defined zero. It is anchored to the epoch once: spans of all ranks align as well as their clocks.
_epoch = time.time_ns() - time.perf_counter_ns()


class Communicator(Protocol):
    """Communicator of ``export``, such as those of mpi4py."""

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on the rank ``root``, and None on the others."""


class _HostTime:
    """Recorder of spans of the host, with the methods of ``DeviceTime``."""

    event = staticmethod(time.perf_counter_ns)

    def add(self, name: str, details: dict[str, Any], start: int, end: int) -> None:
        _spans.append(Span(name, start + _epoch, end - start, threading.current_thread().name, details))

    def read(self) -> None:
        """Do nothing: spans are complete when they are added."""


_time: _HostTime | DeviceTime = _HostTime()


class _Recorder:
    __slots__ = ("_details", "_name", "_start", "_time")

    def __init__(self, name: str, details: dict[str, Any]) -> None:
        self._time = _time
        self._name = name
        self._details = details

    def __enter__(self) -> None:
        self._start = self._time.event()

    def __exit__(self, *error: object) -> None:
        self._time.add(self._name, self._details, self._start, self._time.event())


def active() -> bool:
    """Return whether spans are recorded, or shown by a profiler that is on."""
    return recording or ranges.active()


def enable(on: bool = True, device: Device | None = None) -> None:
    """Start recording, or stop it with ``on=False``.

    Args:
        on: Whether to record.
        device: ``torch.cuda`` to measure the time of the GPU, if this process uses only one. None: host time.
    """
    global recording, _time
    _time.read()
    _time = DeviceTime(device, _epoch, _spans) if on and device is not None else _HostTime()
    recording = on


def span(name: str, **details: Any) -> AbstractContextManager[None]:
    """Record the time spent in a ``with`` block; details are JSON values shown with it, such as ``bucket=3``."""
    around = ranges.around(name) if ranges.active() else None
    if not recording:
        return around or _NOTHING
    recorder = _Recorder(name, details)
    return recorder if around is None else ranges.both(around, recorder)


def mark(name: str, **details: Any) -> None:
    """Record a point in time, as a span of length zero; details are JSON values shown with it."""
    if recording:
        event = _time.event()
        _time.add(name, details, event, event)


def spans() -> tuple[Span, ...]:
    """Return the spans recorded so far, in the order in which they ended."""
    _time.read()
    return tuple(_spans)


def clear() -> None:
    """Delete the spans recorded so far."""
    _time.read()
    _spans.clear()


def totals() -> dict[str, float]:
    """Return the seconds per stage, summed over threads and buckets."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for recorded in spans():
        seconds[recorded.name] += recorded.duration / 1e9
    return dict(seconds)


def export(path: str | os.PathLike[str], comm: Communicator | None = None) -> None:
    """Write the spans as Chrome trace JSON, with one process per rank and one track per thread.

    Args:
        path: Output file; written under a temporary name and renamed, so that readers never see a partial file.
        comm: Communicator of a collective call in which rank 0 writes the spans of all ranks: one of mpi4py, or an
            object whose ``gather`` calls ``torch.distributed.gather_object``. None: this process writes its own spans.
    """
    ranks = [spans()] if comm is None else comm.gather(spans(), root=0)
    if ranks is not None:
        write(path, ranks)
