"""Dense allreduce: the baseline, and Auto's choice on fast networks; in full precision, or in 16 or fewer bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.rounded import sum_rounded
from horovod_sparse.kernels import add_to
from horovod_sparse.rules import Mode, Reduced, SparseVector, Stateless
from horovod_sparse.rules.options import RuleOptions, one_of
from horovod_sparse.wire import DENSE_FORMATS


class Dense(Stateless, Base):
    """Sums complete buckets with one dense allreduce, 2 n (P-1)/P words; only rounding errors are returned."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of the dense allreduce.

        Attributes:
            wire: Format of the values: "float32", "float16", "bfloat16", "log8", "log4", "fitted3", "fitted2" or
                "sign"; None: the bucket's dtype. Each rank's values are rounded, and again the sums; the errors are
                returned.
        """

        indices = "plain"  # fixed, not an option
        wire: str | None = one_of(None, *DENSE_FORMATS)

        @property
        def mode(self) -> Mode:
            """Everything, in this format."""
            return Mode.of_all(self.wire)

    def decide(self, size: int, k: int) -> bool:
        """Return True: sending all entries costs no more than sending some."""
        del size, k
        return True

    def allreduce(self, vector: SparseVector, k: int) -> Reduced:
        """Sum the ranks' vectors; one that has indices is written out first. The total holds every position."""
        del k
        values = vector.values
        if vector.indices is not None:
            values = np.zeros(vector.size, vector.values.dtype, like=vector.values)
            self._kernels.add(vector.indices, vector.values, values)
        rounded, error, wire = self._wire.round(values)
        if error is None:
            return Reduced(SparseVector.full(self._transport.allreduce(values)), vector.nothing())
        total, part, error_of_sums = sum_rounded(self._transport, wire, rounded)
        if error_of_sums is not None:
            add_to(error[part], error_of_sums)
        return Reduced(SparseVector.full(total), SparseVector.full(error))
