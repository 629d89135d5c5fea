"""Sparse vectors, some positions of a bucket with their values, and the result of their exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from horovod_sparse.kernels import copied, kernels_for, to_device
from horovod_sparse.kernels.types import Array, Indices


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Sparse vector of ``size`` elements; positions without an entry are zero.

    Attributes:
        indices: int32, shape (nnz,), ascending and unique; None stands for all positions.
        values: float32 or float64, shape (nnz,), or (size,) if indices is None.
        size: Number of elements of the full vector, below 2**31.
        shared: Whether every rank has the same indices, so that only values are exchanged.
    """

    indices: Array | None
    values: Array
    size: int
    shared: bool = False

    @classmethod
    def empty(cls, size: int, like: Array) -> SparseVector:
        """Return the zero vector with the dtype and device of ``like``."""
        return cls(np.empty_like(like, shape=(0,), dtype=np.int32), np.empty_like(like, shape=(0,)), size)

    @classmethod
    def full(cls, values: Array) -> SparseVector:
        """Return a vector of all positions, as sent by a dense step."""
        return cls(None, values, values.size, shared=True)

    @property
    def entries(self) -> tuple[Array, Array]:
        """Indices and values of a vector that has indices."""
        assert self.indices is not None
        return self.indices, self.values

    def nothing(self) -> SparseVector:
        """Return the zero vector of the same size, dtype and device."""
        return SparseVector.empty(self.size, self.values)

    def cut(self, k: int) -> tuple[SparseVector, SparseVector]:
        """Split the vector into its k largest magnitudes (all if there are fewer; ties: lower index) and the rest."""
        if len(self) <= k:
            return self, self.nothing()
        assert self.indices is not None
        largest, rest = kernels_for(self.values).cut(self.indices, self.values, k)
        return SparseVector(largest[0], largest[1], self.size), SparseVector(rest[0], rest[1], self.size)

    def times(self, factor: float) -> SparseVector:
        """Return the vector multiplied by a factor; not a copy if that is 1."""
        return self if factor == 1 else replace(self, values=self.values * self.values.dtype.type(factor))

    def head(self, count: int) -> SparseVector:
        """Return a copy of the first entries."""
        indices, values = self.entries
        return replace(self, indices=copied(indices[:count]), values=copied(values[:count]))

    def part(self, places: Indices) -> SparseVector:
        """Return the entries with the given ascending entry numbers, which may be on any device."""
        indices, values = self.entries
        places = to_device(places, values)
        return SparseVector(indices[places], values[places], self.size, self.shared)

    def without(self, other: SparseVector) -> SparseVector:
        """Return the entries whose index does not occur in another vector with indices."""
        indices, values = kernels_for(self.values).exclude(*self.entries, other.entries[0])
        return SparseVector(indices, values, self.size)

    def plus(self, *others: SparseVector | None) -> SparseVector:
        """Return the sum of vectors, added in the given order; a single nonempty vector is not copied."""
        parts = [part for part in (self, *others) if part is not None and part.values.size]
        if len(parts) <= 1:
            return parts[0] if parts else self
        if any(part.indices is None for part in parts):
            total = np.zeros_like(self.values, shape=(self.size,))
            for part in parts:
                kernels_for(total).add(part.indices, part.values, total)
            return SparseVector.full(total)
        indices, values = kernels_for(self.values).merge_sum([part.entries for part in parts], self.size)
        return SparseVector(indices, values, self.size)

    def __len__(self) -> int:
        """Return the number of entries."""
        return int(self.values.size)


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """Result of a sparse allreduce.

    Attributes:
        total: Reduced vector, bit-identical on every rank.
        returned: What this rank's memory gets back: the part of its vector that is not in total. That of an owner also
            has entries of other ranks, and the negative of its own values in total.
    """

    total: SparseVector
    returned: SparseVector
