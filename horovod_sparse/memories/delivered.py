"""Where something of a vector reached the other ranks."""

from __future__ import annotations

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels.types import Indices
from horovod_sparse.vector import SparseVector


def delivered(accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> Indices:
    """Positions of entries that did not come back whole; rounding for the wire returns a small part of many.

    Args:
        accumulator: What the vector was taken out of.
        vector: What was sent.
        returned: The part of it that came back.

    Returns:
        int32, ascending. Zeros, as which a shared vector sends the positions that are held, do not count.
    """
    if vector.indices is None:
        if returned.indices is None:  # a failed exchange
            return np.empty_like(vector.values, shape=(0,), dtype=np.int32)
        like = returned.indices
        ranges = [
            np.arange(start, start + part.size, dtype=np.int32, like=like) for start, part in accumulator.gradients
        ]
        return np.concatenate([returned.indices[:0], *ranges])
    indices, values = vector.entries
    there = values != 0
    if len(vector) and len(returned):
        at = np.minimum(np.searchsorted(indices, returned.entries[0]), len(vector) - 1)
        whole = (indices[at] == returned.indices) & (values[at] == returned.values)
        there[at[whole]] = False
    positions: Indices = indices[there]
    return positions
