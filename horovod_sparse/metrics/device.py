"""A device's time: events in its streams, read when the device has come so far."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

from horovod_sparse.metrics.chrome import Span

_MOST_LAUNCHED = 4096


class Device(Protocol):
    """Device that work is launched on and done later: ``torch.cuda``, or a module with the same two names."""

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        """An event with ``record``, ``query``, ``synchronize`` and ``elapsed_time`` (ms), as torch has them."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has done everything."""
        ...


class _Launched(NamedTuple):
    """A span whose end the device may not have reached yet."""

    name: str
    thread: str
    details: dict[str, Any]
    start: Any
    end: Any


class DeviceTime:
    """Collects spans between events; nothing but ``read`` waits for the device.

    Args:
        device: The device.
        epoch: What added to ``time.perf_counter_ns`` gives ns since the epoch.
        spans: Spans are appended here, in the order they ended on the host.
    """

    def __init__(self, device: Device, epoch: int, spans: list[Span]) -> None:
        self._device = device
        self._epoch = epoch
        self._spans = spans
        self._launched: deque[_Launched] = deque()
        self._reading = threading.Lock()
        self._align()

    def _align(self) -> None:
        """Lets the device's time count from now.

        An event's distance from here is a float32 in ms: after a minute 4 us are told apart, after ten 0.06 ms.
        """
        self._device.synchronize()
        self._zero = self.event()
        self._zero.synchronize()
        self._began = time.perf_counter_ns() + self._epoch

    def event(self) -> Any:
        """The end of what was launched so far on this thread's current stream."""
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, details: dict[str, Any], start: Any, end: Any) -> None:
        """Takes a span. Where many are waiting, those that the device is through with are read."""
        self._launched.append(_Launched(name, threading.current_thread().name, details, start, end))
        if len(self._launched) > _MOST_LAUNCHED and self._reading.acquire(blocking=False):
            try:
                while self._launched and self._launched[0].end.query():
                    self._spans.append(self._placed(self._launched.popleft()))
            finally:
                self._reading.release()

    def read(self) -> None:
        """Waits for the device and reads everything."""
        with self._reading:
            while self._launched:
                self._launched[0].end.synchronize()
                self._spans.append(self._placed(self._launched.popleft()))
            self._align()

    def _placed(self, one: _Launched) -> Span:
        """A span that the device is through with, on the axis of the host's time."""
        start = self._began + round(1e6 * self._zero.elapsed_time(one.start))
        duration = round(1e6 * one.start.elapsed_time(one.end))
        return Span(one.name, start, duration, one.thread, one.details)
