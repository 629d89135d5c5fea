"""Device spans, measured with events in streams and read once the device has completed them."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

from horovod_sparse.metrics.chrome import Span

_MOST_LAUNCHED = 4096


class Device(Protocol):
    """Device that executes launched work asynchronously: ``torch.cuda``, or a module with the same two functions."""

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        """Return an event with ``record``, ``query``, ``synchronize`` and ``elapsed_time`` (ms), as in torch."""

    def synchronize(self) -> None:
        """Wait until the device has completed all work."""


class _Launched(NamedTuple):
    """Span whose end the device may not have reached yet."""

    name: str
    thread: str
    details: dict[str, Any]
    start: Any
    end: Any


class DeviceTime:
    """Recorder of spans between events. Only the constructor and ``read`` wait for the device.

    Args:
        device: Device that executes the work.
        epoch: Difference in ns between time since the epoch and ``time.perf_counter_ns``.
        spans: List to append spans to, in the order in which they ended on the host.
    """

    def __init__(self, device: Device, epoch: int, spans: list[Span]) -> None:
        self._device = device
        self._epoch = epoch
        self._spans = spans
        self._launched: deque[_Launched] = deque()
        self._reading = threading.Lock()
        self._align()

    def _align(self) -> None:
        """Set the zero of device time to now.

        The time from zero to an event is a float32 in ms. Its resolution is 4 us after a minute, 0.06 ms after ten.
        """
        self._device.synchronize()
        self._zero = self.event()
        self._zero.synchronize()
        self._began = time.perf_counter_ns() + self._epoch

    def event(self) -> Any:
        """Record an event after all work launched so far on this thread's current stream, and return it."""
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, details: dict[str, Any], start: Any, end: Any) -> None:
        """Add a span. If many are pending, read those that the device has completed."""
        self._launched.append(_Launched(name, threading.current_thread().name, details, start, end))
        if len(self._launched) > _MOST_LAUNCHED and self._reading.acquire(blocking=False):
            try:
                while self._launched and self._launched[0].end.query():
                    self._spans.append(self._placed(self._launched.popleft()))
            finally:
                self._reading.release()

    def read(self) -> None:
        """Wait for the device, and read all spans."""
        with self._reading:
            while self._launched:
                self._launched[0].end.synchronize()
                self._spans.append(self._placed(self._launched.popleft()))
            self._align()

    def _placed(self, launched: _Launched) -> Span:
        """Return a span that the device has completed, with its start in host time."""
        start = self._began + round(1e6 * self._zero.elapsed_time(launched.start))
        duration = round(1e6 * launched.start.elapsed_time(launched.end))
        return Span(launched.name, start, duration, launched.thread, launched.details)
