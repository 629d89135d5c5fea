"""Threads that run functions in the background."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Background:
    """A thread that runs functions one at a time, in the order of submission.

    ``ThreadPoolExecutor`` would do, but Python joins its threads before it calls any exit handler. A rank that exits
    while a function waits for other ranks could then not tell them that it leaves, and both sides would wait for each
    other. This thread is a daemon; ``Lifecycle.close`` joins it after telling them.

    The thread starts with the first submission and ends after ``close()``, or when the object is garbage.

    Args:
        name: Name of the thread.
        call: Public call that its functions are a part of, for reports; empty: none.

    Attributes:
        abandoned: Why nobody will use the result of the function in progress; empty while somebody will.
    """

    def __init__(self, name: str, call: str = "") -> None:
        self.call = call
        self.abandoned = ""
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread: threading.Thread | None = None
        # Not at exit: `Lifecycle.close` decides when it ends.
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function after all that were submitted before it."""
        if self._thread is None or not self._thread.is_alive():
            # Without a reference to this object, which could not become garbage otherwise.
            self._thread = threading.Thread(target=_run, args=[self._queue], name=self._name, daemon=True)
            self._thread.start()
        self._last = future = Future[Any]()
        self._queue.put((future, function))
        return future

    @property
    def busy(self) -> bool:
        """Tell whether a function is running or waiting for its turn."""
        return self._last is not None and not self._last.done()

    def close(self) -> None:
        """End the thread after all functions submitted so far, and wait for that."""
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
        del item, future, function  # not kept alive while this thread waits for the next one
