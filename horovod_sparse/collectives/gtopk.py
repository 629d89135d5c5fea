"""gTopk: a reduction tree whose merges keep the k largest entries, then a broadcast of the root's k entries.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks"
(ICDCS 2019); 4 k log P words per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.collectives.base import Base
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import Reduced, SparseVector, Stateless
from horovod_sparse.wire import Wire


class GTopk(Stateless, Base):
    """Reduction and broadcast over a binomial tree rooted at rank 0; the total has at most k entries.

    Entries that a merge drops are returned on the rank that merged, even if other ranks' entries keep their index in
    the total. Errors from rounding the remaining entries are returned there, too. A binomial tree takes ceil(log2 P)
    levels for any P, without the folding step of the paper.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """The common options of sparse collectives."""

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Reduced:
        """Sum and cut along the tree; merges add the lower rank's entries first, and ties go to the lower index."""
        rank, ranks = self._transport.rank, self._transport.size
        self._transport.traffic.rounds += 2 * (ranks - 1).bit_length()  # up and down the tree
        largest, rest = vector.cut(k)
        returned: list[SparseVector | None] = []
        distance = 1
        while distance < ranks and rank % (2 * distance) == 0:
            if rank + distance < ranks:
                received = wire.unpack(self._receive(rank + distance, vector), vector.size)
                largest, dropped = largest.plus(SparseVector(*received, vector.size)).cut(k)
                returned.append(dropped)
            distance *= 2
        if returned:  # without a merge, the entries are already rounded
            largest, error, wire = self._round(largest)
            returned.append(error)
        message = wire.pack(largest.entries)
        if rank > 0:
            self._transport.send(message, rank - distance).wait()
            message = self._receive(rank - distance, vector)
        children = [rank + (1 << level) for level in reversed(range(distance.bit_length() - 1))]
        for child in children:
            if child < ranks:
                self._transport.send(message, child).wait()
        indices, values = wire.unpack(message, vector.size)
        return Reduced(SparseVector(indices, values, vector.size, shared=True), rest.plus(*returned))

    def _receive(self, rank: int, like: SparseVector) -> Array:
        return self._transport.receive(rank, like.values).wait()
