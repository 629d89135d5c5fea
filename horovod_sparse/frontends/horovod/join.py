"""Ranks that have no more data: what ``hvd.join()`` lets the optimizers of this package do meanwhile."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from horovod_sparse.control.lifecycle import process

_joining: weakref.WeakSet[Any] = weakref.WeakSet()


class Use:
    """When an optimizer was made and has exchanged last, in the order of the program; all ranks make the same ones.

    One that nobody uses any more may be gone on another rank and still be here: to take part for it would be to wait
    for ever. In use are those that have exchanged since the newest optimizer was made, and the new ones.
    """

    _events = itertools.count(1)
    _newest = 0  # when any of them was made last
    _last = 0  # when any of them has exchanged last

    def __init__(self) -> None:
        self._made = Use._newest = next(Use._events)
        self._exchanged = 0

    def note(self) -> None:
        """It exchanges a step."""
        self._exchanged = Use._last = next(Use._events)

    def __bool__(self) -> bool:
        """Tells if it is in use."""
        return self._exchanged > Use._newest or (not self._exchanged and self._made > Use._last)


def let_join(optimizer: Any) -> None:
    """Lets the exchange of an optimizer go on, with nothing to give, while this rank waits in ``hvd.join()``.

    Python's ``join`` may have been imported under any name; what it calls has one place.

    Args:
        optimizer: Has a ``Use`` as ``_use``, and ``_join``, which begins to take part in the other ranks' steps and
            may give a function that waits for the end of that: for optimizers that change parameters meanwhile.
    """
    from horovod.torch import mpi_ops  # here, as local steps do without Horovod

    _joining.add(optimizer)
    process.replace(mpi_ops.mpi_lib, "horovod_torch_join", _joined)


def _joined(join_of_horovod: Callable[..., Any]) -> Callable[..., Any]:
    def join(*arguments: Any) -> Any:
        waits = [optimizer._join() for optimizer in list(_joining) if optimizer._use]
        handle = join_of_horovod(*arguments)  # begins: Horovod's thread takes part in the others' collectives
        for wait in filter(None, waits):
            wait()
        return handle

    return join
