"""Common parts of the collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_sparse.costs.measure import coded_from
from horovod_sparse.kernels import kernels_for
from horovod_sparse.rules import Accumulator, BucketContext, Reduced, SparseVector
from horovod_sparse.rules.options import RuleOptions, one_of
from horovod_sparse.transport.slots import Slots
from horovod_sparse.wire import FORMATS, NEVER, Wire

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport
    from horovod_sparse.transport.traffic import Traffic


# Values of the option ``indices``.
CODINGS = ("plain", "coded")


class Base:
    """Base class of the collectives; sums vectors without indices with a dense allreduce."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of every sparse collective.

        Attributes:
            wire: Format of the values of sparse messages: "float32", "float16", "bfloat16", "log8", "log4", "fitted3"
                or "fitted2"; None: the bucket's dtype. Rounding errors are returned on the rank that rounds.
            indices: "coded": compressed; "plain": 32 bits each; None: coded if that is measured to be faster.
        """

        wire: str | None = one_of(None, *FORMATS)
        indices: str | None = one_of(None, *CODINGS)

    def __init__(self, context: BucketContext, transport: Transport, options: Any) -> None:
        self._transport = transport
        self._options = options
        self._wire = Wire.of(options.wire, context.like.dtype)
        self._wired_for = -1  # k that the wire's coding was chosen for
        self._kernels = kernels_for(context.like)
        self._slots = Slots()

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received so far."""
        return self._transport.traffic

    def decide(self, size: int, k: int) -> bool:
        """Return False: the exchange is always sparse."""
        del size, k
        return False

    def extend(self, accumulator: Accumulator, vector: SparseVector, k: int) -> SparseVector:
        """Return the vector unchanged: what was selected is sent."""
        del accumulator, k
        return vector

    def region(self, size: int) -> tuple[int, int] | None:
        """Return None: this rank keeps no sums."""
        del size
        return None

    def allreduce(self, vector: SparseVector, k: int) -> Reduced:
        """Sum the ranks' vectors; vectors without indices are always summed with a dense allreduce."""
        if vector.indices is None:
            return Reduced(SparseVector.full(self._transport.allreduce(vector.values)), vector.nothing())
        return self._allreduce_rounded(vector, k, self._allreduce)

    def _allreduce_rounded(
        self, vector: SparseVector, k: int, allreduce: Callable[[SparseVector, Wire, int], Reduced]
    ) -> Reduced:
        """Round a vector with indices for the wire, sum the ranks' vectors, and return the rounding errors as well."""
        if k != self._wired_for:
            self._choose_coding(vector, k)
        if not self._wire.format.rounds:
            return allreduce(vector, self._wire, k)
        rounded, error, wire = self._round(vector)
        reduced = allreduce(rounded, wire, k)
        return reduced if error is None else Reduced(reduced.total, reduced.returned.plus(error))

    def _choose_coding(self, vector: SparseVector, k: int) -> None:
        """Set the least number of entries whose indices are coded: forced or as measured, the same on all ranks."""
        if k == self._wired_for:
            return
        if self._options.indices is None:
            least = coded_from(self._transport, vector.values, min(k / vector.size, 1.0))
        else:
            least = 0 if self._options.indices == "coded" else NEVER
        self._wire, self._wired_for = replace(self._wire, coded_from=least), k

    def _round(self, vector: SparseVector) -> tuple[SparseVector, SparseVector | None, Wire]:
        """Round a vector with indices for the wire.

        Returns:
            The rounded vector, the rounding errors (None if nothing is rounded), and the wire that holds the rounded
            values exactly.
        """
        if not self._wire.format.rounds:
            return vector, None, self._wire
        values, error, wire = self._wire.round(vector.values)
        assert error is not None
        smallest = float(np.finfo(error.dtype).smallest_subnormal)
        lost = kernels_for(error).reaching(vector.entries[0], error, smallest)
        return replace(vector, values=values), SparseVector(*lost, vector.size), wire

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Reduced:
        """Sum vectors with indices, whose values ``wire`` holds exactly."""
        raise NotImplementedError
