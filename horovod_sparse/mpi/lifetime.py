"""Keeps MPI alive while a thread of ours is inside it, and tells when this rank leaves it."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

_changed = threading.Condition()
_count = 0
_closed = False
_calls: list[str] = []  # in progress, on whatever thread
_farewells: list[Callable[[], None]] = []  # of this rank
_listeners: list[Callable[[], str]] = []  # that know who else has left

ADVICE = "let every rank take as many steps (equal shares of the data, drop_last=True)"
_whose_end = "Horovod has been shut down, here or by a rank that has left the program"


def on_leaving(farewell: Callable[[], None], listener: Callable[[], str]) -> None:
    """Lets others be told in time that this rank leaves MPI: at exit, or when it finalizes MPI or shuts Horovod down.

    Args:
        farewell: Called once, while MPI is still alive.
        listener: Says who else has left, when MPI is finalized here; empty: nobody.
    """
    _at_exit()
    _attach()
    _farewells.append(farewell)
    _listeners.append(listener)


def leave() -> None:
    """Says the farewells that were not said so far."""
    while _farewells:
        _farewells.pop()()


@functools.cache
def _at_exit() -> None:
    atexit.register(leave)  # runs before Horovod's shutdown where that was registered earlier


def current_call() -> str:
    """The function of this library in which the program waits for other ranks; empty: none that has given a name."""
    return next(iter(_calls[:1]), "")


@contextmanager
def inside_mpi(call: str = "") -> Iterator[None]:
    """Lets MPI_Finalize wait until the block is left.

    When one rank shuts Horovod down, Horovod's background threads finalize MPI on all ranks, whatever other threads
    do there: a thread that is still exchanging would crash. MPI_Finalize begins with what is attached to
    MPI_COMM_SELF, and the function that deletes our attribute does not return before all such blocks are left.

    Args:
        call: Name of a function that users call, in which ranks wait for each other: for reports of stalls. Of calls
            within calls, the outermost is named.

    Raises:
        RuntimeError: MPI is finalized already.
    """
    global _count
    with _changed:
        if _closed or MPI.Is_finalized():
            raise RuntimeError(f"nothing can be exchanged: {_whose_end}: {ADVICE}")
        _attach()
        _count += 1
        if call:
            _calls.append(call)
    try:
        yield
    finally:
        with _changed:
            if call:
                _calls.remove(call)
            _count -= 1
            _changed.notify_all()


@functools.cache
def _attach() -> None:
    def wait(*_: Any) -> None:
        global _closed, _whose_end
        # On another thread it is Horovod that finalizes MPI, as a rule because a rank has asked for it, not this one.
        if threading.current_thread() is threading.main_thread():
            leave()
        with _changed:
            _changed.wait_for(lambda: _count == 0)
            _whose_end = next(filter(None, (listener() for listener in _listeners)), _whose_end)
            _closed = True

    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=wait), "horovod_sparse is inside MPI")
