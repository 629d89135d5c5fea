"""Background threads with a queue of functions."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Background:
    """Thread that runs functions one at a time, in the order of submission.

    Python joins the threads of a ``ThreadPoolExecutor`` before it calls any exit handler. A rank that exits while a
    function waits for other ranks could not notify them first, and both sides would deadlock. This thread is a daemon;
    ``Lifecycle.close`` joins it after it has notified the other ranks.

    The thread starts with the first submission. It ends after ``close()``, or when the object is garbage-collected.

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
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread: threading.Thread | None = None
        # Not at exit: `Lifecycle.close` ends the thread.
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a function to run after those submitted before it, and return its future."""
        if self._thread is None or not self._thread.is_alive():
            # The thread has no reference to this object, so that the object can be garbage-collected.
            self._thread = threading.Thread(target=_run, args=[self._queue], name=self._name, daemon=True)
            self._thread.start()
        self._last = future = Future[Any]()
        self._queue.put((future, function))
        return future

    @property
    def busy(self) -> bool:
        """True while a function is running or queued."""
        return self._last is not None and not self._last.done()

    def close(self) -> None:
        """Wait for all functions submitted so far, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join()


def _run(submitted: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := submitted.get()) is not None:
        future, function = item
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        del item, future, function  # do not keep them alive while waiting for the next one
