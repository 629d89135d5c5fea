"""Dense allreduce: the baseline, and what Auto chooses on fast networks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.collectives.base import Base
from horovod_sparse.kernels import kernels_for
from horovod_sparse.rules import Exchange, SparseVector, Stateless
from horovod_sparse.rules.options import RuleOptions
from horovod_sparse.wire import Wire


class Dense(Stateless, Base):
    """Sums whole buckets with one dense allreduce, 2 n (P-1)/P words; nothing is rounded or returned."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of Dense: none, as values travel as they are."""

        always_dense = True
        wire = None  # no option
        indices = "plain"  # nor is this

    def decide(self, size: int, k: int) -> bool:
        """Everything: it costs no more than some of it."""
        del size, k
        return True

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Exchange:
        """Writes the vector out dense; the total holds every position."""
        del wire  # nothing is rounded
        values = np.zeros(vector.size, vector.values.dtype, like=vector.values)
        kernels_for(values).add(vector.indices, vector.values, values)
        return self.allreduce(SparseVector.full(values), k)
