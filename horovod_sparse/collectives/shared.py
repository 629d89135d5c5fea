"""SharedIndices: sends only values, for ranks that all select the same positions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from horovod_sparse.collectives.base import Base
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import Exchange, SparseVector, Stateless
from horovod_sparse.wire import Wire, concatenate


class SharedIndices(Stateless, Base):
    """One allreduce of k values, 2 k (P-1)/P words; only rounding errors are returned.

    If values are rounded, each rank sums a part of them in full precision and in rank order, and the rounded sums are
    gathered. That takes the same number of words, in the wire's format.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """The common options of sparse collectives."""

        shared_indices = True

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Exchange:
        """Sum the values.

        Raises:
            ValueError: The vector is not marked as having the same indices on every rank.
        """
        del k  # nothing is dropped
        if not vector.shared:
            raise ValueError(
                f"rank {self._transport.rank}: the ranks' vectors have different indices, but the collective 'shared' "
                "sums values only: use a sparsifier whose indices are the same on every rank, such as 'randomblock'"
            )
        if wire.format.rounds:
            values, error = self._sum_rounded(vector, wire)
        else:
            values, error = self._transport.allreduce(vector.values), None
        total = SparseVector(vector.indices, values, vector.size, shared=True)
        return Exchange(total, vector.nothing() if error is None else error)

    def _choose_coding(self, vector: SparseVector, k: int) -> None:
        """Do nothing: no indices are sent."""

    def _sum_rounded(self, vector: SparseVector, wire: Wire) -> tuple[Array, SparseVector | None]:
        """Return the rounded sums of all ranks' values, and the rounding errors of this rank's part of the sums."""
        assert vector.indices is not None
        transport = self._transport
        cuts = [rank * len(vector) // transport.size for rank in range(transport.size + 1)]
        parts = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
        mine = parts[transport.rank]
        sums = functools.reduce(np.add, self._swap(wire, [vector.values[part] for part in parts]))
        rounded, error, wire = self._round(SparseVector(vector.indices[mine], sums, vector.size))
        lengths = [wire.nbytes_all(count) for count in np.diff(cuts).tolist()]
        messages = transport.allgather(wire.pack_all(rounded.values, mine.start), lengths)
        return concatenate(wire.unpack_all(messages, len(vector)))[1], error

    def _swap(self, wire: Wire, parts: Sequence[Array]) -> list[Array]:
        """Send each rank its part of the values; return all ranks' values of this rank's part, in rank order."""
        transport, rank = self._transport, self._transport.rank
        others = [(rank + i) % transport.size for i in range(1, transport.size)]
        sends = transport.send_all((wire.pack_all(parts[other], 0) for other in others), others, parts[rank])
        transport.traffic.rounds += 1
        arrived = {rank: parts[rank]}
        for other in reversed(others):
            arrived[other] = wire.unpack(transport.receive(other, parts[rank]).wait(), parts[rank].size)[1]
        for sending in sends:
            sending.wait()
        return [arrived[other] for other in range(transport.size)]
