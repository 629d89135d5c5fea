"""Top-k in chunks: sends the largest magnitudes of each chunk of the bucket (SparseLoCo, Sarfi et al. 2025)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.rules import Step
from horovod_sparse.rules.options import RuleOptions, integer
from horovod_sparse.sparsifiers.base import Base
from horovod_sparse.vector import SparseVector

# Elements that are ranked at a time, which bounds the temporary arrays: in a cache of the host, or on a device.
_AT_A_TIME = {True: 2**15, False: 2**22}


class ChunkedTopK(Base):
    """Selects the same number of largest magnitudes in each chunk of consecutive positions; at least one.

    Every part of the model then sends in every step, whatever its magnitudes. Ties go to the lower index. In the paper
    chunks are squares of 64 x 64 elements of a matrix.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of ChunkedTopK.

        Attributes:
            chunk: Positions per chunk; the last chunk of a bucket may have fewer.
        """

        chunk: int = integer(4096, least=1)

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move the largest magnitudes of each chunk out of the accumulator."""
        del step
        buffer, size = accumulator.settle(), accumulator.size
        chunk = min(self._options.chunk, size)
        ends = [0, *(end for start, part in accumulator.gradients for end in (start, start + part.size)), size]
        held = [(begin, end) for begin, end in zip(ends[::2], ends[1::2], strict=True) if begin < end]
        rows = max(_AT_A_TIME[isinstance(buffer, np.ndarray)] // chunk, 1) * chunk
        whole = size - size % chunk
        cuts = [*range(0, whole, rows), *{whole, size}]
        positions = [
            _largest(buffer[begin:end], begin, min(chunk, end - begin), k / size, held)
            for begin, end in itertools.pairwise(sorted(cuts))
        ]
        return accumulator.take_at(np.concatenate(positions), shared=False)


def _largest(values: Array, begin: int, chunk: int, density: float, held: list[tuple[int, int]]) -> Indices:
    """Return the positions of the largest magnitudes in each chunk of values that begin at a position.

    Args:
        values: A multiple of ``chunk`` values.
        begin: Position of the first one.
        chunk: Positions per chunk.
        density: Share of each chunk's positions.
        held: Ranges of positions that are not active.

    Returns:
        Positions in the bucket, int32 [m], ascending.
    """
    # As integers, magnitudes have the same order, and NaN is the largest.
    kind = np.dtype(f"int{8 * values.dtype.itemsize}")
    keys = values.view(kind) & np.iinfo(kind).max
    for first, last in held:
        keys[max(first - begin, 0) : max(last - begin, 0)] = -1
    keys = keys.reshape(-1, chunk)
    keep = min(max(round(density * chunk), 1), chunk)
    smallest = np.partition(keys, chunk - keep, axis=1)[:, chunk - keep, None]
    above, equal = keys > smallest, keys == smallest
    missing = keep - above.sum(axis=1, keepdims=True)
    taken = above | (equal & (keys >= 0) & (np.cumsum(equal, axis=1, dtype=np.int32) <= missing))
    return (np.flatnonzero(taken) + begin).astype(np.int32)
