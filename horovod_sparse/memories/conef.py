"""Contractive error feedback: stores the residual in compressed form (ConEF, Li et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels.scratch import SCRATCH
from horovod_sparse.kernels.types import Indices
from horovod_sparse.memories.base import delivered
from horovod_sparse.memories.compressed import CompressedOptions, compressor_for
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.vector import SparseVector


class Contractive:
    """Contractive error feedback: p = g + e and e' = C(p - D).

    D is what was sent and not returned, C an unbiased error compressor. Only the compressed error persists between
    steps. During a step, all buckets share one scratch buffer of the largest bucket's size.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """The common options of memories that compress the error."""

    replaces_momentum = False
    _beta = 0.0  # share of the error that is not fed back; set by a subclass

    def __init__(self, context: BucketContext, options: CompressedOptions) -> None:
        self._context = context
        self._scale, self._step = 1.0, 0  # of the current step
        self._error = compressor_for(context, options)

    def open(self, step: Step, scale: float) -> Accumulator:
        """Decode the error into the scratch buffer that all buckets share."""
        self._scale, self._step = scale, step.number
        buffer = SCRATCH.empty(self._context.size, self._context.like)
        self._error.decode(buffer, scale * (1 - self._beta))
        return Accumulator(buffer, step.gradients, clear=step.clear)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Compress the entries that were not sent or were returned."""
        accumulator.settle()
        accumulator.put_back(returned)
        self._error.rescale(self._scale)
        gone = delivered(accumulator, vector, returned)
        self._set_apart(accumulator, vector, gone)
        self._error.update(accumulator.buffer, gone, 1 - self._beta, self._step)

    def _set_apart(self, accumulator: Accumulator, vector: SparseVector, gone: Indices) -> None:
        """Move separately stored entries out of the buffer; none here."""

    def state_dict(self) -> dict[str, Any]:
        """Return the compressed error, not copied."""
        return self._error.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``; ValueError if it does not fit."""
        self._error.load_state_dict(state)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the compressed errors with their error compressor."""
        return self._error.merge(states)
