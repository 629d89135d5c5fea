"""Union: every rank sends its values at the positions that any rank has selected.

Sparsifiers whose ranks divide the selection among them build on it: MiCRO (Yoon and Oh, HiPC 2023) and its successors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.shared import sum_values
from horovod_sparse.kernels.types import Indices
from horovod_sparse.rules import Accumulator, Reduced, SparseVector, Stateless
from horovod_sparse.wire import Wire


class Union(Stateless, Base):
    """Allgathers the selected positions, and allreduces all ranks' values at their union; nothing is dropped.

    Every rank moves its values at the union out of its accumulator, whether it has selected them or not. For a union of
    m positions, of which a rank has selected k, this takes k (P-1) words of positions and 2 m (P-1)/P of values. Where
    all ranks select the same positions anyway, only values are sent.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """The common options of sparse collectives."""

    def extend(self, accumulator: Accumulator, vector: SparseVector, k: int) -> SparseVector:
        """Return this rank's values at the positions that any rank has selected."""
        if vector.shared:
            return vector
        self._choose_coding(vector, k)
        message = self._wire.pack_indices(vector.entries[0])
        messages, _ = self._transport.allgather_slots(message, self._slots)
        positions = self._united(self._wire.unpack_indices(messages, vector.size), vector.size)
        accumulator.put_back(vector)
        return accumulator.take_at(positions, shared=True)

    def _united(self, parts: Sequence[Indices], size: int) -> Indices:
        """Return the union of positions, ascending."""
        zeros = np.zeros_like(parts[0], dtype=np.float32, shape=(max(part.size for part in parts),))
        return self._kernels.merge_sum([(part, zeros[: part.size]) for part in parts], size)[0]

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Reduced:
        """Sum the values of vectors from ``extend``."""
        del k  # nothing is dropped
        assert vector.shared, "only extend knows which values belong to the union"
        return sum_values(self._transport, wire, vector)
