"""Things made once for each communicator, which keeps them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mpi4py import MPI


@functools.cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval()


def kept(comm: MPI.Intracomm, name: str, make: Callable[[], Any]) -> Any:
    """Something that a communicator keeps under a name, made where there is nothing yet."""
    known: Any = comm.Get_attr(_keyval())
    if known is None:
        known = {}
        comm.Set_attr(_keyval(), known)
    if name not in known:
        known[name] = make()
    return known[name]
