"""A bucket without sparsifier and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.engine.pipeline.base import PipelineBase
from horovod_sparse.engine.pipeline.norms import Norms
from horovod_sparse.kernels import to_device, to_host
from horovod_sparse.kernels.types import Segments
from horovod_sparse.rules import SparseVector, Step

# Facts of another bucket travel as floats, in digits whose sums over thousands of ranks are exact in float32.
_DIGIT, _DIGITS = 1 << 11, 3


class DensePipeline(PipelineBase):
    """A bucket that always travels whole, without memory; one allreduce, in which ranks also say that they work.

    Args:
        context: The bucket and the rank.
        transport: Of the ranks that take part.
        factor: Factor on the totals.
    """

    def facts(self, gradients: Segments, step: Step) -> None:
        """Nothing has to be agreed on."""

    def run(
        self,
        gradients: Segments,
        outputs: Segments,
        step: Step = Step(),
        agreed: NDArray[np.int64] | None = None,
        ahead: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64] | None:
        """Sums one step's gradients."""
        del agreed
        size, like = self._context.size, self._context.like
        digits = np.empty(0) if ahead is None else ahead[:, None] // _DIGIT ** np.arange(_DIGITS) % _DIGIT
        with self._stage("exchange", entries=size):
            # One element more counts the ranks that had a backward pass: no message of its own.
            values = np.zeros(size + 1 + digits.size, like.dtype, like=like)
            self._kernels.accumulate(gradients, values[:size])
            values[size] = not step.idle
            if digits.size:
                values[size + 1 :] = to_device(digits.ravel().astype(like.dtype), like)
            total = self._transport.allreduce(values)
            if not total[size]:
                raise self._no_backward()
        if self._measuring:
            self._measuring = not Norms(replace(step, gradients=gradients)).note(self.counts)
        self.counts.exchanged(size, size, size, size, "dense")
        with self._stage("apply"):
            self._scatter(SparseVector.full(total[:size]), outputs)
        if ahead is None:
            return None
        sums: NDArray[np.int64] = to_host(total[size + 1 :]).astype(np.int64).reshape(digits.shape)
        return sums @ _DIGIT ** np.arange(_DIGITS)

    def undo(self) -> None:
        """Nothing was changed."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes an empty state."""
        del state

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Nothing to carry over."""
        del states, leader
        return {}, []
