"""Helpers for law tests: exact numbers, dense copies of vectors, and bitwise comparison between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import to_host
from horovod_sparse.rules import BucketContext, SparseVector


def context_of(transport: Any, size: int, dtype: Any = np.float32, layers: Sequence[int] = (0,)) -> BucketContext:
    """Return this rank's context for a host bucket of ``size`` elements, with layers that begin at ``layers``."""
    like = np.empty(0, dtype)
    return BucketContext(size, like, 0, transport.rank, transport.size, transport.allreduce, layers=layers)


def eighths(generator: np.random.Generator, size: Any, most: int = 64, dtype: Any = np.float32) -> NDArray[Any]:
    """Return multiples of 1/8 in [-most / 8, most / 8], whose sums are exact in float32."""
    numbers: NDArray[Any] = (generator.integers(-most, most + 1, size) / 8).astype(dtype)
    return numbers


def dense(vector: SparseVector) -> NDArray[Any]:
    """Return the dense array of a vector on the host."""
    if vector.indices is None:
        return np.asarray(vector.values)
    result = np.zeros(vector.size, vector.values.dtype)
    result[vector.indices] = vector.values
    return result


def placed(vector: SparseVector, put: Callable[[Any], Any]) -> SparseVector:
    """Return a vector whose arrays went through ``put``: to a device, or back to the host."""
    indices = None if vector.indices is None else put(vector.indices)
    return SparseVector(indices, put(vector.values), vector.size, vector.shared)


def everywhere(transport: Any, holds: bool) -> bool:
    """Return whether a condition holds on all ranks, with the same answer on all of them; a collective call."""
    return all(transport.allgather_object(bool(holds)))


def fail_together(transport: Any, failures: Iterable[str]) -> None:
    """Raise an AssertionError on all ranks if any rank reports a violated law; a collective call."""
    broken = [
        f"rank {rank}: {law}" for rank, laws in enumerate(transport.allgather_object([*failures])) for law in laws
    ]
    if broken:
        raise AssertionError("laws violated: " + "; ".join(broken[:5]))


def digest(*arrays: Any) -> str:
    """Return a digest of the bits of arrays on any device; all NaNs are equal, as IEEE 754 leaves their bits open."""
    return hashlib.sha256(b"|".join(map(_content, arrays))).hexdigest()


def _content(array: Any) -> bytes:
    if array is None:
        return b""
    host = to_host(array)
    host = np.where(np.isnan(host), host.dtype.type(np.nan), host) if host.dtype.kind == "f" else host
    return repr((host.dtype.str, host.shape)).encode() + host.tobytes()


def content(state: Any) -> Any:
    """Return a state without times and with digests for arrays; equal for bit-identical states."""
    if isinstance(state, dict):
        return {key: content(value) for key, value in state.items() if key != "seconds"}
    return digest(state) if isinstance(state, np.ndarray) else state


def digest_of(*vectors: SparseVector) -> str:
    """Return a digest of the bits of vectors."""
    return digest(*(array for vector in vectors for array in (vector.indices, vector.values)))


def same_bits(transport: Any, *arrays: Any) -> bool:
    """Return whether arrays have the same bits on all ranks; a collective call."""
    return len(set(transport.allgather_object(digest(*arrays)))) == 1
