"""Arrays on the host and on the device, and the paths of device arrays to MPI."""

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
# One run is enough for an emulated device. Ranks that are threads are excluded: they would share its stream.
_ONCE = thorough() and rank_threads.sizes is None
DEVICE = [STAGED, AWARE, DIFFERENT] if _ONCE or not devices.emulated() else []
WAYS = [HOST, *DEVICE]
every_way = pytest.mark.parametrize("put", WAYS, indirect=True)
# For tests that do not depend on the path of messages.
every_device = pytest.mark.parametrize("put", WAYS[:2], indirect=True)


@contextmanager
def through(way: str, rank: int = 0) -> Iterator[Callable[[Any], Any]]:
    """Provide a function that puts arrays on the host or on the device.

    Messages from the device are staged, passed to MPI directly, or differ in this between ranks. If MPI does not accept
    device arrays, messages are staged; only the emulation can pretend that MPI accepts them.
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
    """Empty the pinned pool; provide a list of the sizes in bytes of blocks that are allocated from then on."""
    sizes: list[int] = []

    def block(size: int) -> pinned.Block:
        sizes.append(size)
        return kind(size)

    kind = pinned.Block
    with pytest.MonkeyPatch.context() as patch:
        pinned._pool.cache_clear()
        patch.setattr(pinned, "Block", block)
        yield sizes
