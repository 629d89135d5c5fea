"""What the tests of messages and of collectives share: vectors on the device, and the ways to MPI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
import pytest
from devices import emulated, on_device, to_host

from horovod_sparse import pinned, staging
from horovod_sparse.collectives import Exchange
from horovod_sparse.cudaaware import ask_library
from horovod_sparse.vector import SparseVector

STAGED, AWARE, DIFFERENT = "staged", "aware", "different"
WAYS = [STAGED, AWARE, DIFFERENT]


@contextmanager
def through(way: str, rank: int = 0) -> Iterator[None]:
    """Messages of the device take a way to MPI: staged, directly, or not the same on every rank.

    Where MPI cannot take the device's arrays, which only the stand-in can pretend, they are staged.
    """
    aware = {STAGED: False, AWARE: True, DIFFERENT: rank % 2 == 0}[way] and (emulated() or bool(ask_library()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "cuda_aware", lambda: aware)
        if emulated():
            patch.setattr(cupy._stream, "mpi", "yes" if aware else "")
        yield


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


def vector_on_device(vector: SparseVector) -> SparseVector:
    indices = None if vector.indices is None else on_device(vector.indices)
    return SparseVector(indices, on_device(vector.values), vector.size, vector.shared)


def arrays(*vectors: SparseVector) -> list[Any]:
    """Indices and values of vectors, on the host; every NaN the same, as IEEE 754 leaves its sign and payload open."""
    found = []
    for vector in vectors:
        values = to_host(vector.values)
        found += [None if vector.indices is None else to_host(vector.indices)]
        found += [np.where(np.isnan(values), values.dtype.type(np.nan), values)]
    return found


def results(exchange: Exchange) -> list[Any]:
    return arrays(exchange.total, exchange.returned)
