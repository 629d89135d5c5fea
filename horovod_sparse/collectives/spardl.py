"""SparDL: a reduce-scatter that cuts each block to k/P entries in every hop, then an allgather.

Zhao et al., "SparDL: Distributed Deep Learning Training with Efficient Sparse Communication" (ICDE 2024); 4 k (P-1)/P
words per rank, whatever the ranks select.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.split import regions
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import Reduced, SparseVector, Stateless
from horovod_sparse.wire import Wire, concatenate


class SparDL(Stateless, Base):
    """Sums blocks of the bucket in ceil(log2 P) hops, for any P, and gathers the sums; the total has about k entries.

    There is a block for each rank. In a hop of distance d, a rank passes the blocks of the ranks d and more ahead of it
    on to the rank d ahead, which adds them to its own; distances are powers of two, in descending order. A block never
    holds more than ceil(k/P) entries: the largest. What a rank cuts off is returned on this rank, and so are errors
    from rounding what it sends.

    The paper also divides the ranks into teams, which sum before the teams do.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """The common options of sparse collectives."""

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Reduced:
        """Sum the ranks' vectors to a total of at most P ceil(k/P) entries."""
        transport, size = self._transport, vector.size
        rank, ranks, most = transport.rank, transport.size, -(-k // transport.size)
        boundaries = np.arange(ranks + 1, dtype=np.int64) * size // ranks
        returned: list[SparseVector | None] = []

        def cut(block: SparseVector) -> SparseVector:
            kept, dropped = block.cut(most)
            returned.append(dropped)
            return kept

        blocks = [cut(block) for block in _blocks(vector, boundaries)]
        held, distance = ranks, 1 << (ranks - 1).bit_length() >> 1
        while distance:
            leaving = sorted((rank + offset) % ranks for offset in range(distance, held))
            message, error = self._message([blocks[number] for number in leaving])
            returned.append(error)
            sending = transport.send(message, (rank + distance) % ranks)
            arrived = transport.receive((rank - distance) % ranks, vector.values).wait()
            transport.traffic.rounds += 1
            others = _blocks(SparseVector(*wire.unpack(arrived, size), size), boundaries)
            for number in ((rank + offset) % ranks for offset in range(held - distance)):
                blocks[number] = cut(blocks[number].plus(others[number]))
            sending.wait()
            held, distance = distance, distance // 2
        message, error = self._message([blocks[rank]])
        messages, _ = transport.allgather_slots(message, self._slots)
        total = SparseVector(*concatenate(wire.unpack_all(messages, size)), size, shared=True)
        return Reduced(total, vector.nothing().plus(*returned, error))

    def _message(self, blocks: list[SparseVector]) -> tuple[Array, SparseVector | None]:
        """Return blocks in ascending order as a message, and the errors from rounding their values."""
        joined = SparseVector(*concatenate([block.entries for block in blocks]), blocks[0].size)
        rounded, error, wire = self._round(joined)
        return wire.pack(rounded.entries), error


def _blocks(vector: SparseVector, boundaries: Array) -> list[SparseVector]:
    """Return the vector's entries in each block, as vectors of the bucket."""
    return [SparseVector(*entries, vector.size) for entries in regions(vector, boundaries)]
