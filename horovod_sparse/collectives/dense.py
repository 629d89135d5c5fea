"""Dense allreduce: the baseline, and Auto's choice on fast networks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.collectives.base import Base
from horovod_sparse.kernels import kernels_for
from horovod_sparse.rules import Exchange, SparseVector, Stateless
from horovod_sparse.rules.options import RuleOptions
from horovod_sparse.wire import Wire


class Dense(Stateless, Base):
    """Sums complete buckets with one dense allreduce, 2 n (P-1)/P words; nothing is rounded or returned."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """No options: values are not rounded and there are no indices."""

        always_dense = True
        wire = None  # fixed, not an option
        indices = "plain"  # fixed, not an option

    def decide(self, size: int, k: int) -> bool:
        """Return True: sending all entries costs no more than sending some."""
        del size, k
        return True

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Exchange:
        """Scatter the vector into a dense array and sum that; the total holds every position."""
        del wire  # nothing is rounded
        values = np.zeros(vector.size, vector.values.dtype, like=vector.values)
        kernels_for(values).add(vector.indices, vector.values, values)
        return self.allreduce(SparseVector.full(values), k)
