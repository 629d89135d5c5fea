"""Numbers whose sums are exact, vectors written out, and bits compared between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import to_host
from horovod_sparse.rules import BucketContext, SparseVector


def place_of(transport: Any, size: int, dtype: Any = np.float32) -> BucketContext:
    """This rank's place in a bucket of so many elements on the host."""
    like = np.empty(0, dtype)
    return BucketContext(size, like, 0, transport.rank, transport.size, transport.allreduce)


def eighths(generator: np.random.Generator, size: Any, most: int = 64, dtype: Any = np.float32) -> NDArray[Any]:
    """Numbers between -most / 8 and most / 8, both included, whose sums are exact in float32."""
    numbers: NDArray[Any] = (generator.integers(-most, most + 1, size) / 8).astype(dtype)
    return numbers


def dense(vector: SparseVector) -> NDArray[Any]:
    """A vector of the host written out."""
    if vector.indices is None:
        return np.asarray(vector.values)
    result = np.zeros(vector.size, vector.values.dtype)
    result[vector.indices] = vector.values
    return result


def placed(vector: SparseVector, put: Callable[[Any], Any]) -> SparseVector:
    """A vector whose arrays were put elsewhere: on a device, or back on the host."""
    indices = None if vector.indices is None else put(vector.indices)
    return SparseVector(indices, put(vector.values), vector.size, vector.shared)


def everywhere(transport: Any, holds: bool) -> bool:
    """Tells whether something holds on all ranks; all of them learn the same answer and so fail together."""
    return all(transport.allgather_object(bool(holds)))


def fail_together(transport: Any, failures: Iterable[str]) -> None:
    """Raises an AssertionError on all ranks where any has laws that do not hold; a collective call."""
    broken = [
        f"rank {rank}: {law}" for rank, laws in enumerate(transport.allgather_object([*failures])) for law in laws
    ]
    if broken:
        raise AssertionError("does not hold: " + "; ".join(broken[:5]))


def digest(*arrays: Any) -> str:
    """Equal for arrays of the same bits, on whatever device; IEEE 754 leaves the sign and payload of NaN open."""
    return hashlib.sha256(b"|".join(map(_content, arrays))).hexdigest()


def _content(array: Any) -> bytes:
    if array is None:
        return b""
    host = to_host(array)
    host = np.where(np.isnan(host), host.dtype.type(np.nan), host) if host.dtype.kind == "f" else host
    return repr((host.dtype.str, host.shape)).encode() + host.tobytes()


def content(state: Any) -> Any:
    """All that a state holds, but clocks; equal for states of the same bits."""
    if isinstance(state, dict):
        return {key: content(value) for key, value in state.items() if key != "seconds"}
    return digest(state) if isinstance(state, np.ndarray) else state


def digest_of(*vectors: SparseVector) -> str:
    """Equal for vectors of the same bits."""
    return digest(*(array for one in vectors for array in (one.indices, one.values)))


def same_bits(transport: Any, *arrays: Any) -> bool:
    """Tells whether arrays have the same bits on all ranks."""
    return len(set(transport.allgather_object(digest(*arrays)))) == 1
