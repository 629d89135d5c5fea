"""TopkA: every rank gathers every rank's entries and sums them up itself.

Renggli et al., "SparCML" (SC 2019), sparse allgather; 2 k (P-1) words per rank.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives.dense import allreduce_dense
from horovod_sparse.collectives.exchange import MPI_COUNT_MAX, Exchange, Traffic
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class TopkA(Stateless):
    """Allgather of the counts, one Allgatherv of indices and values, a merge in rank order; nothing is returned.

    Args:
        comm: The communicator of the ranks that take part.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.traffic = Traffic()

    def allreduce(self, vector: SparseVector) -> Exchange:
        """Sums the ranks' vectors, which may have different numbers of entries, or none.

        Raises:
            RuntimeError: The gathered vectors would exceed MPI's 2**31 - 1 bytes; raised on every rank alike.
        """
        nothing = SparseVector.empty(vector.size, vector.values)
        if vector.indices is None:
            return Exchange(SparseVector.full(allreduce_dense(self._comm, vector.values, self.traffic)), nothing)
        vectors = self._gather(vector.indices, vector.values)
        indices, values = kernels_for(vector.values).merge_sum(vectors, vector.size)
        return Exchange(SparseVector(indices, values, vector.size, shared=True), nothing)

    def _gather(self, indices: Array, values: Array) -> list[tuple[Array, Array]]:
        """Every rank's (indices, values), in rank order."""
        counts = np.empty(self._comm.Get_size(), np.int64)
        self._comm.Allgather(np.array([values.size], np.int64), counts)
        blocks = [_block_bytes(int(count), values.itemsize) for count in counts]
        if sum(blocks) > MPI_COUNT_MAX:
            raise RuntimeError(
                f"rank {self._comm.Get_rank()}: TopkA would gather {sum(blocks)} bytes from {len(blocks)} ranks, more "
                f"than MPI's limit of {MPI_COUNT_MAX} a message: lower density or bucket_bytes"
            )
        received = np.empty(sum(blocks), np.uint8)
        self._comm.Allgatherv(_pack(indices, values), (received, blocks))
        others = self._comm.Get_size() - 1
        mine = blocks[self._comm.Get_rank()]
        # A ring passes on every block but one; on average over the ranks that is the bytes of the others' blocks.
        self.traffic.sent(others * counts.itemsize + sum(blocks) - mine, 2 * others)
        ends = np.cumsum(blocks)
        return [
            _unpack(received[end - block : end], int(count), values.dtype)
            for end, block, count in zip(ends, blocks, counts, strict=True)
        ]


def _value_offset(count: int) -> int:
    """Where the values start behind ``count`` int32 indices: aligned for float64."""
    return -(-4 * count // 8) * 8


def _block_bytes(count: int, itemsize: int) -> int:
    """Bytes of one rank's block; a multiple of 8, so that the next block is aligned, too."""
    return -(-(_value_offset(count) + itemsize * count) // 8) * 8


def _pack(indices: Array, values: Array) -> Array:
    """Indices and values in one message: half the latency of two."""
    count = values.size
    block = np.zeros(_block_bytes(count, values.itemsize), np.uint8)
    start = _value_offset(count)
    block[: 4 * count] = indices.view(np.uint8)
    block[start : start + values.nbytes] = values.view(np.uint8)
    return block


def _unpack(block: Array, count: int, dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    """The indices and values of a block, as views."""
    start = _value_offset(count)
    indices = block[: 4 * count].view(np.int32)
    return indices, block[start : start + dtype.itemsize * count].view(dtype)
