"""Improved contractive error feedback: the error of the error compressor is fed back, too (ConEF)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import kernels_for, to_device
from horovod_sparse.kernels.types import Indices
from horovod_sparse.memories.base import delivered
from horovod_sparse.memories.compressed import CompressedOptions, compressor_for
from horovod_sparse.memories.scratch import SCRATCH
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import one_of
from horovod_sparse.rules.states import require_positions
from horovod_sparse.vector import SparseVector


class ImprovedContractive:
    """p = g + e + q, where q' = C(p - D - e') is what e' does not hold of the error p - D.

    Version 1: e' = C(p - D), by an error compressor of its own. Version 2: e' = Q(p - D), the largest entries of the
    error, as many as were sent, kept as they are. What a sketch q holds already stays there: e' then takes the largest
    of what is new, so that nothing is held twice.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Options of improved ConEF.

        Attributes:
            version: 1, which needs quantization, or 2.

        Raises:
            ValueError: A value is out of range, or version 1 is to have sketches.
        """

        version: int = one_of(2, 1, 2)

        def __post_init__(self) -> None:
            """Checks that the version can have the compressor."""
            super().__post_init__()
            if self.version == 1 and self.compressor == "sketch":
                raise ValueError(
                    "version 1 does not go with compressor 'sketch': a sketch misses more than it was given, a second "
                    "one of what the first one missed still more, and fed back to each other both grow without bound: "
                    "use compressor='quantize', or version=2"
                )

    replaces_momentum = False

    def __init__(self, context: BucketContext, options: Options) -> None:
        self._context = context
        self._scale, self._step = 1.0, 0  # of the step in progress
        # e of version 1; of version 2 the entries.
        self._error = compressor_for(context, options, part=1) if options.version == 1 else None
        self._entries = SparseVector.empty(context.size, context.like)
        self._rest = compressor_for(context, options)  # q

    def open(self, step: Step, scale: float) -> Accumulator:
        """Writes e + q out into a buffer that is shared with the other buckets."""
        self._scale, self._step = scale, step.number
        buffer = SCRATCH.lend(self._context.size, self._context.like)
        self._rest.decode(buffer, scale)
        if self._error is not None:
            self._error.add_to(buffer, scale)
        entries = self._entries
        kernels_for(buffer).add(entries.indices, entries.values * buffer.dtype.type(scale), buffer)
        return Accumulator(buffer, step.gradients, clear=step.clear)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Compresses what was not taken and what came back, and then what that missed."""
        accumulator.settle()
        accumulator.put_back(returned)
        gone = delivered(accumulator, vector, returned)
        self._rest.rescale(self._scale)
        if self._error is not None:
            self._error.rescale(self._scale)
            self._error.update(accumulator.buffer, gone, 1.0, self._step)
            self._error.add_to(accumulator.buffer, -1.0)
        else:
            self._entries = self._take_entries(accumulator, 0 if vector.indices is None else len(vector), gone)
        self._rest.update(accumulator.buffer, gone, 1.0, self._step)
        SCRATCH.give_back(accumulator.buffer)

    def _take_entries(self, accumulator: Accumulator, k: int, gone: Indices) -> SparseVector:
        """Moves the k largest entries out of the buffer, of what the rest does not hold already; none that are gone."""
        buffer = accumulator.buffer
        came_back = buffer[gone]
        if self._rest.carries:
            self._rest.add_to(buffer, -1.0)
        buffer[gone] = 0
        entries = accumulator.take_largest(min(k, accumulator.size // 2))
        if self._rest.carries:
            self._rest.add_to(buffer, 1.0)
        buffer[gone] = came_back
        return entries

    def state_dict(self) -> dict[str, Any]:
        """Both parts of the error."""
        entries = self._entries
        return {
            "error": {} if self._error is None else self._error.state_dict(),
            "indices": entries.indices,
            "values": entries.values,
            "rest": self._rest.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` of the same version; ValueError when it does not fit."""
        if state["indices"].size != state["values"].size:
            raise ValueError(f"{state['values'].size} values do not fit {state['indices'].size} indices of entries")
        require_positions(state["indices"], self._context.size, "indices of entries")
        if self._error is not None:
            self._error.load_state_dict(state["error"])
        indices, values = (to_device(state[key].copy(), self._context.like) for key in ("indices", "values"))
        self._entries = SparseVector(indices, values, self._context.size)
        self._rest.load_state_dict(state["rest"])

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Both parts, each by its own rule; entries at the same position add up."""
        size = self._context.size
        nothing = SparseVector.empty(size, np.empty(0, self._context.like.dtype))
        entries = nothing.plus(*(SparseVector(state["indices"], state["values"], size) for state in states))
        return {
            "error": {} if self._error is None else self._error.merge([state["error"] for state in states]),
            "indices": entries.indices,
            "values": entries.values,
            "rest": self._rest.merge([state["rest"] for state in states]),
        }
