"""Background threads with a queue of functions."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

_Queue: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"

# Threads of objects that have been garbage-collected, while they run.
_ending: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Background:
    """Thread that runs functions one at a time, in the order of submission.

    Python joins the threads of a ``ThreadPoolExecutor`` before it calls any exit handler. A rank that exits while a
    function waits for other ranks could not notify them first, and both sides would deadlock. This thread is a daemon;
    ``Lifecycle.close`` joins it after it has notified the other ranks.

    The thread starts with the first submission. It ends after ``close()``, or when the object is garbage-collected and
    everything submitted is done; ``join_ending`` waits for that.

    Args:
        name: Name of the thread.
        call: Public call that the functions are part of, for stall reports; empty: none.

    Attributes:
        abandoned: Reason why the result of the function in progress will not be used; empty: it will be used.
    """

    def __init__(self, name: str, call: str = "") -> None:
        self.call = call
        self.abandoned = ""
        self._name = name
        self._queue: _Queue = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._threads: list[threading.Thread] = []  # the one that was started last, if any
        # Not at exit: `Lifecycle.close` ends the thread.
        weakref.finalize(self, _end, self._queue, self._threads).atexit = False

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a function to run after those submitted before it, and return its future."""
        if not any(thread.is_alive() for thread in self._threads):
            # The thread has no reference to this object, so that the object can be garbage-collected.
            thread = threading.Thread(target=_run, args=[self._queue], name=self._name, daemon=True)
            self._threads[:] = [thread]
            thread.start()
        self._last = future = Future[Any]()
        self._queue.put((future, function))
        return future

    @property
    def busy(self) -> bool:
        """True while a function is running or queued."""
        return self._last is not None and not self._last.done()

    def close(self) -> None:
        """Wait for all functions submitted so far, and end the thread."""
        threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        self._threads.clear()
        for thread in threads:
            self._queue.put(None)
            thread.join()


def join_ending(seconds: float | None = None) -> None:
    """Wait for the threads of garbage-collected objects; to be called before the program ends.

    Python would end them in the middle of a function of torch, which aborts the process. A thread that ends may release
    the last reference to an object with another thread, which is then waited for, too.

    Args:
        seconds: Limit of the wait for each thread; None: as long as it takes.
    """
    joined = {threading.current_thread()}
    while waiting := {thread for thread in list(_ending) if thread.is_alive()} - joined:
        for thread in waiting:
            thread.join(seconds)
        joined |= waiting


# Also where ``Lifecycle.close`` has nothing to close, as after the end of torch's process group.
atexit.register(join_ending, 10.0)


def _end(submitted: _Queue, threads: list[threading.Thread]) -> None:
    submitted.put(None)
    _ending.update(threads)


def _run(submitted: _Queue) -> None:
    while (item := submitted.get()) is not None:
        future, function = item
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        del item, future, function  # do not keep them alive while waiting for the next one
