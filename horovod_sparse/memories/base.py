"""Common parts of the memories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.vector import SparseVector


def delivered(accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> Indices:
    """Return the positions, int32 and ascending, of the entries that were delivered, that is, not returned completely.

    Takes the arguments of ``Memory.close``. Rounding for the wire returns a small part of many entries; such entries
    count as delivered. Zeros do not: a vector with shared indices sends held positions as zeros.
    """
    if vector.indices is None:
        nothing = np.empty_like(vector.values, shape=(0,), dtype=np.int32)
        if returned.values is vector.values:  # a failed exchange
            return nothing
        ranges = [
            np.arange(start, start + part.size, dtype=np.int32, like=nothing) for start, part in accumulator.gradients
        ]
        return np.concatenate([nothing, *ranges])
    indices, values = vector.entries
    there = values != 0
    if returned.indices is None:
        there &= values != returned.values[indices]
    elif len(vector) and len(returned):
        at = np.minimum(np.searchsorted(indices, returned.entries[0]), len(vector) - 1)
        whole = (indices[at] == returned.indices) & (values[at] == returned.values)
        there[at[whole]] = False
    positions: Indices = indices[there]
    return positions


def total(arrays: Sequence[Array], like: Array) -> NDArray[np.floating]:
    """Return the sum of NumPy arrays, in the order given; zeros if there are none.

    Raises:
        ValueError: An array has another shape or dtype than ``like``, which may be on a device.
    """
    result = np.zeros(like.shape, like.dtype)
    for array in arrays:
        require_fit(array, like)
        result += array
    return result


def require_fit(array: Array, like: Array) -> None:
    """Raise ValueError unless an array of a state has the shape and dtype of the array that it replaces."""
    if array.shape != like.shape or array.dtype != like.dtype:
        raise ValueError(
            f"an array of shape {array.shape} and dtype {array.dtype} does not fit one of shape {like.shape} and "
            f"dtype {like.dtype}: load the state with the model, configuration and bucket size it was saved with"
        )
