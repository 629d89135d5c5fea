"""Arrays of the host and of the device, and the ways that those of the device take to MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import devices  # before CuPy is imported
import numpy as np
import pytest
import rank_threads
from laws import thorough

from horovod_sparse.transport import pinned, staging
from horovod_sparse.transport.cuda_aware import ask_library

HOST, STAGED, AWARE, DIFFERENT = "host", "staged", "aware", "different"
# Where the device is emulated, once is enough, and not for ranks that are threads: they would share its stream.
_ONCE = thorough() and rank_threads.sizes is None
DEVICE = [STAGED, AWARE, DIFFERENT] if _ONCE or not devices.emulated() else []
WAYS = [HOST, *DEVICE]
every_way = pytest.mark.parametrize("put", WAYS, indirect=True)
# Where it does not matter how messages get there.
every_device = pytest.mark.parametrize("put", WAYS[:2], indirect=True)


@contextmanager
def through(way: str, rank: int = 0) -> Iterator[Callable[[Any], Any]]:
    """Gives a function that puts arrays on the host or on the device.

    Messages of the device are staged, go to MPI directly, or not the same way on every rank. Where MPI cannot take the
    device's arrays, which only the stand-in can pretend, they are staged.
    """
    if way == HOST:
        yield np.asarray
        return
    aware = {STAGED: False, AWARE: True, DIFFERENT: rank % 2 == 0}[way] and (devices.emulated() or bool(ask_library()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "cuda_aware", lambda: aware)
        if devices.emulated():
            patch.setattr(devices.cupy._stream, "mpi", "yes" if aware else "")
        yield devices.on_device


@contextmanager
def allocations() -> Iterator[list[int]]:
    """The bytes of the pinned blocks that are allocated in the block of code, where there were none before."""
    sizes: list[int] = []

    def block(size: int) -> pinned.Block:
        sizes.append(size)
        return kind(size)

    kind = pinned.Block
    with pytest.MonkeyPatch.context() as patch:
        pinned._pool.cache_clear()
        patch.setattr(pinned, "Block", block)
        yield sizes
