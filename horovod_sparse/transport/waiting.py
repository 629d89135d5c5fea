"""Waiting for other ranks.

MPI spins while it waits. Where the threads of a node outnumber its cores, a rank that spins takes the core from a rank
that computes, so there this module polls and sleeps instead.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

SETTING = "HOROVOD_SPARSE_WAIT"  # "spin", "sleep", or "auto" (default)

# A message that is due within this time, in seconds, is worth a spin: a pause takes longer.
_SPIN = 20e-6
# Pauses grow from the first to the last of these, in seconds: MPI moves data only while it is called.
_FIRST_PAUSE, _LAST_PAUSE, _GROWTH = 10e-6, 50e-6, 1.5
_PR_SET_TIMERSLACK = 29  # from linux/prctl.h

# A process that is interrupted more often, per second, shares its cores: time slices last a few milliseconds. A process
# with cores to itself is interrupted a few times per second.
_INTERRUPTIONS, _OBSERVED = 50, 0.5  # the latter in seconds

_LOG = logging.getLogger("horovod_sparse")
_thread = threading.local()
_abandoned: list[Callable[[], object]] = []


class Waiting:
    """Choice of how a rank waits: it spins until there is a reason to sleep, and from then on sleeps.

    Args:
        environment: Environment variables.

    Attributes:
        sleeps: Whether the rank sleeps while it waits.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        setting = environment.get(SETTING, "auto")
        if setting not in ("auto", "spin", "sleep"):
            _warn(setting)
            setting = "auto"
        self._observes = setting == "auto"
        self._last = (0.0, 0)  # time and number of interruptions at the last observation
        self.sleeps = setting == "sleep"

    def share_cores(self, cores: float, threads: int) -> None:
        """Sleep from now on where the ranks' threads outnumber the cores, unless the user has chosen otherwise.

        Processes of other jobs, or of ranks that another container hides, are noticed later, by interruptions.

        Args:
            cores: Cores of the node per rank, possibly a fraction.
            threads: Threads that this rank runs while it waits, including the waiting one.
        """
        if self._observes and cores < threads:
            self.sleeps = True

    def wait(self, poll: Callable[[], T], block: Callable[[], T], pause: float = 0.0) -> T:
        """Wait for other ranks.

        Args:
            poll: Returns a true value once the wait is over; makes progress on messages in the meantime.
            block: Waits, and returns the same value. Called where the rank has the cores to spin.
            pause: Seconds between polls; 0: chosen here.
        """
        if not (pause or self.sleeps):
            done = block()
            if self._observes:
                self._observe(time.monotonic())
            return done
        try:
            return _poll(poll, pause)
        except BaseException:
            keep_alive([poll])
            raise

    def _observe(self, now: float) -> None:
        """Sleep from now on if other processes have interrupted this one often."""
        then, before = self._last
        if now - then < _OBSERVED:
            return
        interruptions = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        self._last = now, interruptions
        # After a long time without an exchange, nothing is known about its share of the interruptions.
        if now - then < 4 * _OBSERVED and interruptions - before > _INTERRUPTIONS * (now - then):
            self.sleeps = True


@functools.cache
def _warn(setting: str) -> None:
    """Warn once: every connection reads the setting."""
    _LOG.warning("%s is %r, but must be auto, spin or sleep: using auto", SETTING, setting)


def keep_alive(waits: Iterable[Callable[[], object]]) -> None:
    """Keep the buffers of waits that an exception ended: MPI may still write to them."""
    _abandoned.extend(waits)


def _poll(poll: Callable[[], T], pause: float) -> T:
    if done := poll():
        return done
    if not hasattr(_thread, "precise"):
        _thread.precise = _sleep_precisely()
    spin_until = time.perf_counter() + _SPIN
    while not pause and time.perf_counter() < spin_until:
        if done := poll():
            return done
    current = pause or _FIRST_PAUSE
    while not (done := poll()):
        time.sleep(current)
        current = pause or min(_GROWTH * current, _LAST_PAUSE)
    return done


def _sleep_precisely() -> bool:
    """Let this thread's sleeps end on time; by default, Linux lets them end up to 50 us late."""
    return bool(ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0) == 0)
