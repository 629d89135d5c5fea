"""Pipeline of a bucket that is always sent dense."""

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

# Facts of the next bucket are sent as floats, in digits whose sums over thousands of ranks are exact in float32.
_DIGIT, _DIGITS = 1 << 11, 3


class DensePipeline(PipelineBase):
    """A bucket without selection and memory: one dense allreduce, which also counts the ranks with a backward pass."""

    def _run(
        self,
        gradients: Segments,
        outputs: Segments,
        step: Step,
        agreed: NDArray[np.int64] | None,
        ahead: NDArray[np.int64] | None,
    ) -> NDArray[np.int64] | None:
        del agreed
        size, like = self._context.size, self._context.like
        digits = np.empty(0) if ahead is None else ahead[:, None] // _DIGIT ** np.arange(_DIGITS) % _DIGIT
        self._enter("exchange", entries=size)
        # The element after the bucket counts the ranks that had a backward pass: no separate message.
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
        self._enter("apply")
        self._scatter(SparseVector.full(total[:size]), outputs)
        if ahead is None:
            return None
        sums: NDArray[np.int64] = to_host(total[size + 1 :]).astype(np.int64).reshape(digits.shape)
        return sums @ _DIGIT ** np.arange(_DIGITS)

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
