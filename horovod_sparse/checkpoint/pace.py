"""Times of regular saves: every few steps or seconds, or as often as a share of the time allows."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from statistics import median

_EVERY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(%|s)")
_WINDOW = 50  # steps whose median is the duration of a step
_FIRST = 10  # steps before the first save: their median is what later steps are compared with


class Pace:
    """Decision when to save next, from the clock of one rank.

    A save costs the time that it holds the training thread, and the number of steps during which it is in progress
    times what the median step takes longer meanwhile. If a share of the time is given, the next save is due when the
    average cost is that share of the time since the last one began. The first is due after ten steps.

    Args:
        every: Number of steps (100), seconds ("600s"), or a share of the time ("1%").
        clock: Function that returns seconds.

    Raises:
        ValueError: ``every`` is none of these.
    """

    def __init__(self, every: int | str, clock: Callable[[], float] = time.monotonic) -> None:
        match = _EVERY.fullmatch(every) if isinstance(every, str) else None
        amount, unit = (float(match[1]), match[2]) if match else (every, "")
        if (not match and type(every) is not int) or not 0 < float(amount) < (100 if unit == "%" else float("inf")):
            raise ValueError(f'every={every!r} is no interval: pass steps (100), seconds ("600s") or a share ("1%")')
        self._amount, self._unit = float(amount), unit
        self._clock = clock
        self._start = self._last_step = self._last_save = clock()
        self._steps: deque[float] = deque(maxlen=_WINDOW)  # seconds of steps without a save in progress
        self._during: list[float] = []  # seconds of steps with one
        self._held = 0.0  # seconds that the save in progress held the training thread
        self._spent, self._saves = 0.0, 0

    @property
    def overhead(self) -> float:
        """Share of the time since the start that completed saves have cost, from 0 to 1."""
        return self._spent / max(self._clock() - self._start, 1e-9)

    def due(self, step: int, in_progress: bool) -> bool:
        """Return whether to save now. Call this after every step, with whether a save is still in progress."""
        now = self._clock()
        (self._during if self._held else self._steps).append(now - self._last_step)
        self._last_step = now
        if self._held and not in_progress:
            slower = median(self._during) - median(self._steps) if self._steps else 0.0
            self._spent += self._held + len(self._during) * max(slower, 0.0)
            self._saves += 1
            self._held = 0.0
            self._during.clear()
        if not self._unit:
            return step % int(self._amount) == 0
        if self._unit == "s":
            return now - self._last_save >= self._amount
        if self._held or not self._saves:
            return not self._held and len(self._steps) >= _FIRST
        return self._spent / self._saves <= self._amount / 100 * (now - self._last_save)

    def saved(self, seconds: float) -> None:
        """Count a save that has just begun and held the training thread for this time."""
        self._held += seconds
        self._last_save = self._last_step = self._clock()
