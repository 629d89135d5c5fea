"""Contractive error feedback: the residual itself is compressed (ConEF, Li et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.memories.base import delivered
from horovod_sparse.memories.compressed import CompressedOptions, compressor_for
from horovod_sparse.memories.scratch import SCRATCH
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.vector import SparseVector


class Contractive:
    """e' = C(p - D) with p = g + e, where D was sent and C is an unbiased error compressor.

    Only the compressed error lasts from step to step. In a step, one buffer of the largest bucket's size is in use,
    whatever the number of buckets.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Options of ConEF: those of every compressed memory."""

    replaces_momentum = False
    _beta = 0.0  # share of the error that is not fed back; of the subclass

    def __init__(self, context: BucketContext, options: CompressedOptions) -> None:
        self._context = context
        self._scale, self._step = 1.0, 0  # of the step in progress
        self._error = compressor_for(context, options)

    def open(self, step: Step, scale: float) -> Accumulator:
        """Writes the error out into a buffer that is shared with the other buckets."""
        self._scale, self._step = scale, step.number
        buffer = SCRATCH.lend(self._context.size, self._context.like)
        self._error.decode(buffer, scale * (1 - self._beta))
        return Accumulator(buffer, step.gradients, clear=step.clear)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Compresses what was not taken and what came back."""
        accumulator.settle()
        accumulator.put_back(returned)
        self._error.rescale(self._scale)
        gone = delivered(accumulator, vector, returned)
        self._error.update(accumulator.buffer, gone, 1 - self._beta, self._step)
        SCRATCH.give_back(accumulator.buffer)

    def state_dict(self) -> dict[str, Any]:
        """The compressed error."""
        return self._error.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``; ValueError when it does not fit."""
        self._error.load_state_dict(state)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The compressed errors, merged as their compressor does it."""
        return self._error.merge(states)
