"""The vector that travels, some positions of a bucket and their values; and what an exchange makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.kernels import kernels_for, to_device
from horovod_sparse.kernels.types import Array, Indices


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Entries of a vector of ``size`` elements; every position not named is zero.

    Attributes:
        indices: int32, shape (nnz,), ascending and unique; None stands for all positions.
        values: float32 or float64, shape (nnz,), or (size,) where indices is None.
        size: Number of elements of the full vector, below 2**31.
        shared: True when every rank holds the same indices, so that only values need to travel.
    """

    indices: Array | None
    values: Array
    size: int
    shared: bool = False

    @classmethod
    def empty(cls, size: int, like: Array) -> SparseVector:
        """The zero vector, with values of the dtype and on the device of ``like``."""
        return cls(np.empty_like(like, shape=(0,), dtype=np.int32), np.empty_like(like, shape=(0,)), size)

    @classmethod
    def full(cls, values: Array) -> SparseVector:
        """A vector that holds every position, as a dense step sends it."""
        return cls(None, values, values.size, shared=True)

    @property
    def entries(self) -> tuple[Array, Array]:
        """Indices and values of a vector that has indices."""
        assert self.indices is not None
        return self.indices, self.values

    def nothing(self) -> SparseVector:
        """The zero vector of the same size, dtype and device."""
        return SparseVector.empty(self.size, self.values)

    def cut(self, k: int) -> tuple[SparseVector, SparseVector]:
        """Parts the k largest magnitudes (all if there are fewer; ties: lower index) from the rest."""
        if len(self) <= k:
            return self, self.nothing()
        assert self.indices is not None
        largest, rest = kernels_for(self.values).cut(self.indices, self.values, k)
        return SparseVector(largest[0], largest[1], self.size), SparseVector(rest[0], rest[1], self.size)

    def part(self, places: Indices) -> SparseVector:
        """The entries at some places of the vector; ascending ones, on any device."""
        indices, values = self.entries
        there = to_device(places, values)
        return SparseVector(indices[there], values[there], self.size, self.shared)

    def without(self, other: SparseVector) -> SparseVector:
        """The entries whose index another vector, which has indices, does not hold."""
        indices, values = kernels_for(self.values).exclude(*self.entries, other.indices)
        return SparseVector(indices, values, self.size)

    def plus(self, *others: SparseVector | None) -> SparseVector:
        """The sum of vectors with indices, added in the order given; this vector itself where the others are empty."""
        parts = [one for one in (self, *others) if one is not None and one.values.size]
        if len(parts) <= 1:
            return parts[0] if parts else self
        indices, values = kernels_for(self.values).merge_sum([one.entries for one in parts], self.size)
        return SparseVector(indices, values, self.size)

    def __len__(self) -> int:
        """Number of entries held."""
        return int(self.values.size)

    @property
    def nbytes(self) -> int:
        """Bytes of indices and values together, what one copy of the vector costs on the wire."""
        return int(self.values.nbytes + (0 if self.indices is None else self.indices.nbytes))


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Result of a sparse allreduce.

    Attributes:
        total: The reduced vector, the same bits on every rank.
        returned: The part of this rank's vector that total does not hold; it goes back to this rank's memory.
    """

    total: SparseVector
    returned: SparseVector
