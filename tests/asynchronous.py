"""Fake ``torch.cuda``: a device that works asynchronously, on a clock that tests advance."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class Clock:
    """Host clock in ns that replaces the module ``time``."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def perf_counter(self) -> float:
        return self.now / 1e9

    def work(self, nanoseconds: int) -> None:
        """Advance the clock, as if the host were busy."""
        self.now += nanoseconds


class AsynchronousDevice:
    """Device with streams, on which the host launches work without waiting for it.

    Attributes:
        waits: Number of times that the host has waited for the device.
        events: Number of existing events that have been recorded.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.waits = 0
        self.events = 0
        self._until: defaultdict[str, int] = defaultdict(int)  # time at which a stream completes all its work
        self._thread = threading.local()

    @property
    def current(self) -> str:
        """Current stream of this thread."""
        return getattr(self._thread, "stream", "main")

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Make a stream the current one of this thread."""
        before, self._thread.stream = self.current, name
        yield
        self._thread.stream = before

    def launch(self, nanoseconds: int) -> None:
        """Add work to the current stream."""
        self._until[self.current] = self.reached + nanoseconds

    def follow(self, stream: str) -> None:
        """Make the current stream wait for the work that another stream has so far."""
        self._until[self.current] = max(self._until[self.current], self._until[stream])

    @property
    def reached(self) -> int:
        """Time at which the current stream completes its work, at the earliest now."""
        return max(self.clock.now, self._until[self.current])

    def wait_until(self, time: int) -> None:
        self.waits += 1
        self.clock.now = max(self.clock.now, time)

    def synchronize(self) -> None:
        self.wait_until(max(self._until.values(), default=0))

    def Event(self, *, enable_timing: bool) -> Event:  # noqa: N802 - torch's name
        assert enable_timing, "the event would have no time"
        return Event(self)


class Event:
    """Event like torch's: gives times only once the device has reached it, with the precision of float32 in ms."""

    def __init__(self, device: AsynchronousDevice) -> None:
        self._device = device
        self._at: int | None = None

    def record(self) -> None:
        self._at = self._device.reached
        self._device.events += 1

    def __del__(self) -> None:
        self._device.events -= self._at is not None

    def query(self) -> bool:
        assert self._at is not None
        return self._at <= self._device.clock.now

    def synchronize(self) -> None:
        assert self._at is not None
        self._device.wait_until(self._at)

    def elapsed_time(self, end: Any) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready")
        return float(np.float32((end._at - self._at) / 1e6))
