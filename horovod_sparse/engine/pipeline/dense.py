"""Pipeline of a bucket that is always sent dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from horovod_sparse.engine.pipeline.base import PipelineBase
from horovod_sparse.engine.pipeline.norms import Norms
from horovod_sparse.kernels.types import Segments
from horovod_sparse.rules import SparseVector, Step
from horovod_sparse.transport.base import Sum


class DensePipeline(PipelineBase):
    """A bucket without selection and memory: one dense allreduce, which also counts the ranks with a backward pass."""

    def begin(self, gradients: Segments, outputs: Segments, step: Step) -> Callable[[], None]:
        """Send the gradients of one step; return what ends the step, as ``run``.

        The message travels beside those of other buckets that are exchanged before the step ends.
        """
        self._start()
        try:
            total = self._send(gradients, step)
        finally:
            self._leave()

        def end() -> None:
            self._start()
            try:
                self._receive(total, outputs, replace(step, gradients=gradients))
            finally:
                self._leave()

        return end

    def _run(self, gradients: Segments, outputs: Segments, step: Step) -> None:
        total = self._send(gradients, step)
        self._transport.traffic.rounds += 1
        self._receive(total, outputs, replace(step, gradients=gradients))

    def _send(self, gradients: Segments, step: Step) -> Sum:
        size, like = self._context.size, self._context.like
        self._enter("exchange", entries=size)
        # The element after the bucket counts the ranks that had a backward pass: no separate message.
        values = np.zeros(size + 1, like.dtype, like=like)
        self._kernels.accumulate(gradients, values[:size])
        values[size] = not step.idle
        return self._transport.begin_allreduce(values)

    def _receive(self, sending: Sum, outputs: Segments, step: Step) -> None:
        size = self._context.size
        self._enter("exchange", entries=size)
        total = sending.wait()
        if not total[size]:
            raise self._no_backward()
        if self._measuring:
            self._measuring = not Norms(step).note(self.counts)
        self.counts.exchanged(size, size, size, size, "dense")
        self._enter("apply")
        self._scatter(SparseVector.full(total[:size]), outputs)

    def undo(self) -> None:
        """Change nothing: there is no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept any state, as nothing depends on it."""
        del state

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return an empty state."""
        del states, leader
        return {}, []
