"""Keeps the optimizers of ranks in ``hvd.join()`` participating in the steps of the other ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from horovod_sparse.control.lifecycle import process

_joining: weakref.WeakSet[Any] = weakref.WeakSet()


class Use:
    """Record of when an optimizer was created and last exchanged a step, to decide whether it is still in use.

    An optimizer that is no longer used may exist on this rank but not on others; participating for it would then wait
    forever. In use are optimizers that have exchanged a step since the newest one was created, and new ones. The order
    of these events is the same on all ranks.
    """

    _events = itertools.count(1)
    _newest = 0  # event of the last creation of any optimizer
    _last = 0  # event of the last exchange of any optimizer

    def __init__(self) -> None:
        self._made = Use._newest = next(Use._events)
        self._exchanged = 0

    def note(self) -> None:
        """Note that the optimizer exchanges a step."""
        self._exchanged = Use._last = next(Use._events)

    def __bool__(self) -> bool:
        """Return whether the optimizer is in use."""
        return self._exchanged > Use._newest or (not self._exchanged and self._made > Use._last)


def let_join(optimizer: Any) -> None:
    """Let an optimizer participate with zero gradients while this rank waits in ``hvd.join()``.

    Replaces the library function that ``hvd.join`` calls, as scripts may have imported ``join`` under any name.

    Args:
        optimizer: Has a ``Use`` as ``_use``, and a method ``_join`` that starts participating in the other ranks'
            steps, and returns a function that waits for the end, or None if there is nothing to take part in.
    """
    from horovod.torch import mpi_ops  # imported here, as local steps work without Horovod

    _joining.add(optimizer)
    process.replace(mpi_ops.mpi_lib, "horovod_torch_join", _joined)


def _joined(join_of_horovod: Callable[..., Any]) -> Callable[..., Any]:
    def join(*arguments: Any) -> Any:
        waits = [optimizer._join() for optimizer in list(_joining) if optimizer._use]
        handle = join_of_horovod(*arguments)  # only starts: Horovod's thread takes part in the others' collectives
        for wait in filter(None, waits):
            wait()
        return handle

    return join
