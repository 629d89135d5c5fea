"""One bucket's way from gradients to the averaged gradient: the only file that knows all the stages."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from horovod_sparse import trace
from horovod_sparse.collectives import Exchange, Traffic
from horovod_sparse.compression import Sparse
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array, Segments
from horovod_sparse.vector import SparseVector


class Pipeline:
    """Memory, sparsifier and collective of one bucket.

    Args:
        sparse: The configuration, the same on every rank.
        size: Elements n of the bucket.
        like: Array whose dtype (float32 or float64) and device the bucket takes.
        comm: Communicator of the ranks that take part.
        number: The bucket's number, for traces and messages.
    """

    def __init__(self, sparse: Sparse, size: int, like: Array, comm: MPI.Intracomm, number: int = 0) -> None:
        self._sparse = sparse
        self._size = size
        self._like = like[:0]
        self._comm = comm
        self._number = number
        self._unit = 0.0  # of what the memory holds; 0: nothing yet
        self.memory, self.sparsifier, self.collective = sparse.build(size, like, comm)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent for this bucket."""
        return self.collective.traffic

    def run(
        self, gradients: Segments, outputs: Segments, *, unit: float = 1.0, factor: float = 1.0, idle: bool = False
    ) -> None:
        """Exchanges one step's gradients.

        Law: total + sum over ranks of the new memory = sum over ranks of (scale * old memory + gradients), where
        scale = old unit / new unit.

        Args:
            gradients: This rank's gradients; positions in gaps are held (neither added to nor selected from).
            outputs: Written with factor * total, in their own dtypes; may be the gradients' own arrays.
            unit: What the optimizer multiplies these gradients by: the learning rate. When it changes, what the
                memory holds is rescaled, so that it stays the same as an update. A unit of 0, as some warm-ups start
                with, allows no such factor; the last other one stays in force.
            factor: Factor on the total: 1/P averages.
            idle: This rank had no backward pass in this step.

        Raises:
            RuntimeError: No rank had a backward pass. The memory is unchanged.
        """
        with trace.span("select", bucket=self._number):
            finite = kernels_for(self._like).all_finite(gradients)
        with trace.span("agree", bucket=self._number):
            elements = sum(array.size for _, array in gradients)
            poisoned, working, active = self._consensus(np.array([not finite, not idle, elements], np.int64)).tolist()
        if not working:
            raise RuntimeError(
                f"rank {self._comm.Get_rank()}: step() or synchronize() without backward() on any of "
                f"{self._comm.Get_size()} ranks: call loss.backward() first"
            )
        # The same on every rank, also where parameters are held on some of them only.
        k = self._sparse.k(active // self._comm.Get_size())
        exchange = self._dense_step(gradients, k) if poisoned else self._sparse_step(gradients, k, unit)
        with trace.span("apply", bucket=self._number):
            total = exchange.total
            kernels_for(total.values).scatter(total.indices, total.values, outputs, factor)

    def _sparse_step(self, gradients: Segments, k: int, unit: float) -> Exchange:
        with trace.span("select", bucket=self._number):
            accumulator = self.memory.open(gradients, self._rescaling(unit))
            if self.collective.entries(self._size, k) < self._size:
                vector = self.sparsifier.take(accumulator, k, self._consensus)
            else:
                vector = accumulator.take_all()
            self._unit = unit or self._unit
        with trace.span("exchange", bucket=self._number, entries=len(vector)):
            try:
                exchange = self.collective.allreduce(vector, k)
            except BaseException:
                self.memory.close(accumulator, vector, returned=vector)  # nothing arrived anywhere: nothing is lost
                raise
        with trace.span("apply", bucket=self._number):
            self.memory.close(accumulator, vector, exchange.returned)
        return exchange

    def _dense_step(self, gradients: Segments, k: int) -> Exchange:
        """Sends the gradients whole and leaves the memory alone.

        A gradient with NaN or Inf reaches every rank as dense training would show it, so that a GradScaler skips
        the step everywhere, and no residual is poisoned by it.
        """
        with trace.span("exchange", bucket=self._number, entries=self._size):
            whole = np.zeros(self._size, self._like.dtype, like=self._like)
            kernels_for(whole).accumulate(gradients, whole, 1.0)
            return self.collective.allreduce(SparseVector.full(whole), k)

    def _rescaling(self, unit: float) -> float:
        """Factor that turns what the memory holds into the new unit."""
        return self._unit / unit if self._unit > 0 and unit > 0 else 1.0

    def _consensus(self, array: Array) -> Array:
        total = np.empty_like(array)
        self._comm.Allreduce(array, total)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The state of the three parts on this rank, and the unit of the memory."""
        return {
            "unit": self._unit,
            "memory": self.memory.state_dict(),
            "sparsifier": self.sparsifier.state_dict(),
            "collective": self.collective.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` of the same configuration and bucket."""
        self.memory.load_state_dict(state["memory"])
        self._unit = float(state["unit"])
        self.sparsifier.load_state_dict(state["sparsifier"])
        self.collective.load_state_dict(state["collective"])
