"""One bucket's way from gradients to the averaged gradient: the only file that knows all the stages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from mpi4py import MPI

from horovod_sparse import trace
from horovod_sparse.accumulator import Accumulator
from horovod_sparse.collectives import Exchange, Traffic
from horovod_sparse.compression import Sparse
from horovod_sparse.consensus import consensus_of
from horovod_sparse.kernels import kernels_for
from horovod_sparse.kernels.types import Array, Segments
from horovod_sparse.place import Place
from horovod_sparse.schedules import Moment
from horovod_sparse.snapshot import snapshot
from horovod_sparse.step import Step
from horovod_sparse.vector import SparseVector

_LOG = logging.getLogger("horovod_sparse")


class Pipeline:
    """Memory, sparsifier, collective and schedule of one bucket.

    Args:
        sparse: The configuration, the same on every rank.
        size: Elements n of the bucket.
        like: Array whose dtype (float32 or float64) and device the bucket takes.
        comm: Communicator of the ranks that take part.
        number: The bucket's number, for traces and messages.
        undoable: Whether ``undo`` will be asked for: it takes a copy of the state before every step, which a memory of
            the bucket's size doubles.
    """

    def __init__(
        self,
        sparse: Sparse,
        size: int,
        like: Array,
        comm: MPI.Intracomm,
        number: int = 0,
        undoable: bool = False,
    ) -> None:
        self._sparse = sparse
        self._size = size
        self._like = like[:0]
        self._comm = comm
        self._consensus = consensus_of(comm)
        self._number = number
        self.stage = "select"  # the one in progress, or the last one; for messages
        self._unit = 0.0  # of what the memory holds; 0: nothing yet
        self._steps = 0
        self._density = 0.0  # in force in the last step
        # Everything travels in every step, and nothing is remembered, whatever the ranks hold.
        self._plain = (sparse.collective, sparse.memory) == ("dense", "none")
        self._undoable = undoable
        self._exchanged = False  # in a step that may still be undone
        self._before: dict[str, Any] = {}  # the state that step began with
        place = Place(size, like[:0], number, comm.Get_rank(), comm.Get_size())
        self.memory, self.sparsifier, self.collective, self.schedule = sparse.build(place, comm)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent for this bucket."""
        return self.collective.traffic

    def run(self, gradients: Segments, outputs: Segments, step: Step, factor: float = 1.0) -> None:
        """Exchanges one step's gradients.

        Law: total + sum over ranks of the new memory = sum over ranks of (scale * old memory + gradients), where
        scale = old unit / new unit. The unit is learning rate / loss scale * factor: what the memory holds times the
        unit is an update, also where another number of ranks takes the memory over.

        Args:
            gradients: This rank's gradients; positions in gaps are held (neither added to nor selected from).
            outputs: Written with factor * total, in their own dtypes; may be the gradients' own arrays.
            step: Under what conditions. When the unit changes, what the memory holds is rescaled, so that it stays the
                same as an update. A unit of 0, as some warm-ups start with, allows no such factor; the last other one
                stays in force.
            factor: Factor on the total: 1/P averages.

        Raises:
            RuntimeError: No rank had a backward pass. The memory is unchanged.
        """
        poisoned, active = self._agree(gradients, step)
        if self._undoable:
            with self._stage("select"):
                self._before = snapshot(self.state_dict(), self._before)
            self._exchanged = True
        unit = step.unit * factor
        exchange = self._dense_step(gradients, active) if poisoned else self._sparse_step(gradients, active, step, unit)
        with self._stage("apply"):
            total = exchange.total
            kernels_for(total.values).scatter(total.indices, total.values, outputs, factor)

    def _agree(self, gradients: Segments, step: Step) -> tuple[bool, int]:
        """Whether a gradient of any rank is not finite, and how many elements take part, in the mean over the ranks."""
        elements = sum(array.size for _, array in gradients)
        if self._plain and self._number:  # that any rank had a backward pass was seen in bucket 0
            return False, elements
        with self._stage("select"):
            finite = kernels_for(self._like).all_finite(gradients)
        with self._stage("agree"):
            mine = np.array([not finite, not step.idle, elements], np.int64)
            poisoned, working, active = self._consensus(mine).tolist()
        if not working:
            raise RuntimeError(
                f"rank {self._comm.Get_rank()}: step() or synchronize() without backward() on any of "
                f"{self._comm.Get_size()} ranks: call loss.backward() first"
            )
        # The same on every rank, also where parameters are held on some of them only.
        return bool(poisoned), active // self._comm.Get_size()

    def _sparse_step(self, gradients: Segments, active: int, step: Step, unit: float) -> Exchange:
        with self._stage("select"):
            moment = self._moment(gradients, step)
            densities = self.schedule.densities(moment)
            accumulator = self.memory.open(gradients, self._rescaling(unit))
            vector, density = self._take(accumulator, densities, active, moment)
            self._unit = unit or self._unit
            self._note_density(density if vector.indices is not None else 1.0)
            k = self._sparse.k(active, density)
        with self._stage("exchange", entries=len(vector)):
            try:
                exchange = self.collective.allreduce(vector, k)
            except BaseException:
                self.memory.close(accumulator, vector, returned=vector)  # nothing arrived anywhere: nothing is lost
                raise
        with self._stage("apply"):
            self.memory.close(accumulator, vector, exchange.returned)
        self._steps += 1
        return exchange

    def _stage(self, name: str, **details: Any) -> AbstractContextManager[None]:
        self.stage = name
        return trace.span(name, bucket=self._number, **details)

    def _take(
        self, accumulator: Accumulator, densities: Sequence[float], active: int, moment: Moment
    ) -> tuple[SparseVector, float]:
        """What is sent, out of the accumulator, and the density that it stands for."""
        ks = [self._sparse.k(active, density) for density in densities]
        if self.collective.entries(self._size, ks[0]) == self._size:
            return accumulator.take_all(), densities[0]
        vector = self.sparsifier.take(accumulator, ks[0], self._consensus)
        if not self.schedule.weighs:
            return vector, densities[0]
        levels = [vector]
        for k in ks[1:]:
            levels.append(levels[-1].cut(k)[0])  # not out of the whole bucket again
        gains = self._gains(accumulator, levels, moment)
        chosen = self.schedule.choose(gains, moment)
        trace.mark("weigh", bucket=self._number, step=self._steps, gains=gains, chosen=chosen)
        if chosen is None:
            accumulator.put_back(vector)
            return accumulator.take_all(), densities[0]
        accumulator.put_back(vector.without(levels[chosen]))
        return levels[chosen], densities[chosen]

    def _gains(self, accumulator: Accumulator, levels: Sequence[SparseVector], moment: Moment) -> list[float]:
        """The share of the accumulated gradient's squared norm in each of the vectors, averaged over the ranks."""
        square_norm = kernels_for(self._like).square_norm
        squares = [square_norm([(0, level.values)]) for level in levels]
        rest = square_norm(accumulator.active())
        whole, *parts = moment.mean([squares[0] + rest, *squares])
        return [part / whole if whole > 0 else 1.0 for part in parts]

    def _moment(self, gradients: Segments, step: Step) -> Moment:
        return Moment(
            step=self._steps,
            epoch=step.epoch,
            learning_rate=step.learning_rate,
            square_norm=lambda: kernels_for(self._like).square_norm(gradients) / step.loss_scale**2,
            mean=lambda numbers: (self._consensus(np.array(numbers)) / self._comm.Get_size()).tolist(),
        )

    def _note_density(self, density: float) -> None:
        trace.mark("density", bucket=self._number, step=self._steps, density=density)
        if density != self._density and self._comm.Get_rank() == 0:
            _LOG.info("bucket %d, step %d: density %.3g", self._number, self._steps, density)
        self._density = density

    def _dense_step(self, gradients: Segments, active: int) -> Exchange:
        """Sends the gradients whole and leaves the memory alone.

        A gradient with NaN or Inf reaches every rank as dense training would show it, so that a GradScaler skips
        the step everywhere, and no residual is poisoned by it.
        """
        with self._stage("exchange", entries=self._size):
            whole = np.zeros(self._size, self._like.dtype, like=self._like)
            kernels_for(whole).accumulate(gradients, whole, 1.0)
            return self.collective.allreduce(SparseVector.full(whole), self._sparse.k(active))

    def _rescaling(self, unit: float) -> float:
        """Factor that turns what the memory holds into the new unit."""
        return self._unit / unit if self._unit > 0 and unit > 0 else 1.0

    def confirm(self) -> None:
        """The step that was exchanged last has been applied: it can no longer be undone."""
        self._exchanged = False

    def undo(self) -> None:
        """Goes back to the state before the step that was exchanged last, unless it was confirmed."""
        if self._exchanged:
            self.load_state_dict(self._before)
            self._exchanged = False

    def state_dict(self) -> dict[str, Any]:
        """The state of the four parts on this rank, the unit of the memory and the number of steps.

        Arrays are not copied: see ``snapshot``.
        """
        return {
            "unit": self._unit,
            "steps": self._steps,
            "memory": self.memory.state_dict(),
            "sparsifier": self.sparsifier.state_dict(),
            "collective": self.collective.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` of the same configuration and bucket."""
        self.memory.load_state_dict(state["memory"])
        self._unit, self._steps = float(state["unit"]), int(state["steps"])
        self.sparsifier.load_state_dict(state["sparsifier"])
        self.collective.load_state_dict(state["collective"])
        self.schedule.load_state_dict(state["schedule"])
