"""Keeps MPI alive while a thread of ours is inside it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

_changed = threading.Condition()
_count = 0
_closed = False
_call = ""


def current_call() -> str:
    """The function of this library in which the program waits for other ranks; empty: none that has given a name."""
    return _call


@contextmanager
def inside_mpi(call: str = "") -> Iterator[None]:
    """Lets MPI_Finalize wait until the block is left.

    When one rank shuts Horovod down, Horovod's background threads finalize MPI on all ranks, whatever other threads
    do there: a thread that is still exchanging would crash. MPI_Finalize begins with what is attached to
    MPI_COMM_SELF, and the function that deletes our attribute does not return before all such blocks are left.

    Args:
        call: Name of a function that users call, in which ranks wait for each other: for reports of stalls.

    Raises:
        RuntimeError: MPI is finalized already.
    """
    global _count, _call
    with _changed:
        if _closed or MPI.Is_finalized():
            raise RuntimeError(
                "nothing can be exchanged: Horovod has been shut down, here or by a rank that has left the program: "
                "let every rank take as many steps (equal shares of the data, drop_last=True)"
            )
        _attach()
        _count += 1
    _call = call or _call
    try:
        yield
    finally:
        if call:
            _call = ""
        with _changed:
            _count -= 1
            _changed.notify_all()


@functools.cache
def _attach() -> None:
    def wait(*_: Any) -> None:
        global _closed
        with _changed:
            _changed.wait_for(lambda: _count == 0)
            _closed = True

    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=wait), "horovod_sparse is inside MPI")
