"""Pipeline of a bucket that is always sent dense."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from horovod_sparse.engine.pipeline.base import Pipeline
from horovod_sparse.engine.pipeline.norms import Norms
from horovod_sparse.kernels import packed, to_device
from horovod_sparse.kernels.scratch import SCRATCH
from horovod_sparse.kernels.types import Array, Segments
from horovod_sparse.rules import Conditions, SparseVector, Step


class DensePipeline(Pipeline):
    """A bucket without selection and memory: one dense allreduce, which also counts the ranks with a backward pass."""

    def begin(self, gradients: Segments, outputs: Segments, conditions: Conditions) -> Callable[[], None]:
        """Send the gradients of one step; return what ends the step, as ``run``.

        Other buckets may be exchanged in between; their messages are in flight at the same time.
        """
        step = Step.of(conditions, gradients=gradients)
        try:
            total = self._transport.begin_allreduce(self._packed(step))
        finally:
            self._leave()

        def end() -> None:
            try:
                self._enter("exchange", entries=self._context.size)
                self._finish(total.wait(), outputs, step)
            finally:
                self._leave()

        return end

    def _run(self, gradients: Segments, outputs: Segments, conditions: Conditions, resumes: bool) -> None:
        del resumes  # nothing is remembered of the exchange before
        step = Step.of(conditions, gradients=gradients)
        values = self._packed(step)
        self._transport.allreduce_in_place(values)
        self._finish(values, outputs, step)

    def _packed(self, step: Step) -> Array:
        """Return the gradients, and whether this rank had a backward pass: the sum counts the ranks that had one."""
        self._enter("exchange", entries=self._context.size)
        values = SCRATCH.empty(self._context.size + 1, self._context.like)
        packed(step.gradients, values[:-1])
        values[-1:] = to_device(np.array([not step.idle], values.dtype), values)
        return values

    def _finish(self, total: Array, outputs: Segments, step: Step) -> None:
        size = self._context.size
        if not total[size]:
            raise self._no_backward()
        if self._measuring:
            self._measuring = not Norms(step).note(self.counts)
        self.counts.exchanged(size, size, size, size, "dense")
        self._enter("apply")
        self._scatter(SparseVector.full(total[:size]), outputs)
