"""Common parts of the collectives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_sparse.costs.measure import coded_from
from horovod_sparse.rules import BucketContext, Exchange, SparseVector
from horovod_sparse.rules.options import RuleOptions, one_of
from horovod_sparse.wire import FORMATS, NEVER, Wire

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport
    from horovod_sparse.transport.traffic import Traffic


# Ways of indices that can be forced.
CODINGS = ("plain", "coded")


class Base:
    """A collective on a transport of its own, with the way that vectors without indices take.

    Args:
        context: The bucket and the rank.
        transport: Of the ranks that take part.
        options: Of the algorithm.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of every sparse collective.

        Attributes:
            wire: Format in which the values of vectors with indices travel: "float32", "float16", "bfloat16", "log8" or
                "log4"; None: as they are. What rounding takes away is returned on the rank that rounds.
            indices: "coded": in few bits; "plain": in 32; None: coded where that is measured to be faster.
        """

        wire: str | None = one_of(None, *FORMATS)
        indices: str | None = one_of(None, *CODINGS)

    def __init__(self, context: BucketContext, transport: Transport, options: Any) -> None:
        self._transport = transport
        self._options = options
        self._wire = Wire.of(options.wire, context.like.dtype)

    @property
    def traffic(self) -> Traffic:
        """Payload this rank has sent and received so far."""
        return self._transport.traffic

    def decide(self, size: int, k: int) -> bool:
        """Nothing: the vector with indices is what this collective is for."""
        del size, k
        return False

    def allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the ranks' vectors; those without indices densely, whatever the algorithm.

        Args:
            vector: This rank's vector; not changed. All ranks' have indices, or none has.
            k: Entries that a total has where the algorithm limits them; the same on every rank.
        """
        if vector.indices is None:
            return Exchange(SparseVector.full(self._transport.allreduce(vector.values)), vector.nothing())
        self._choose_coding(vector, k)
        rounded, error, wire = self._round(vector)
        exchange = self._allreduce(rounded, wire, k)
        return exchange if error is None else Exchange(exchange.total, exchange.returned.plus(error))

    def _choose_coding(self, vector: SparseVector, k: int) -> None:
        """Sets from how many entries on the wire codes indices: forced, or as measured; alike on all ranks."""
        if self._options.indices is None:
            least = coded_from(self._transport, vector.values, min(k / vector.size, 1.0))
        else:
            least = 0 if self._options.indices == "coded" else NEVER
        self._wire = replace(self._wire, coded_from=least)

    def _round(self, vector: SparseVector) -> tuple[SparseVector, SparseVector | None, Wire]:
        """Parts a vector with indices into one that survives the way and, where values are rounded, the errors.

        The wire that is returned beside them is the one that holds what survives.
        """
        values, error, wire = self._wire.round(vector.values)
        if error is None:
            return vector, None, wire
        lost = np.flatnonzero(error)
        return replace(vector, values=values), SparseVector(vector.entries[0][lost], error[lost], vector.size), wire

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Exchange:
        """Sums vectors with indices, whose values the wire holds."""
        raise NotImplementedError
