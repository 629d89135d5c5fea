"""Improved contractive error feedback: also feeds back the error of the error compressor (ConEF)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import kernels_for, to_device
from horovod_sparse.kernels.types import Indices
from horovod_sparse.memories.compressed import CompressedOptions, compressor_for
from horovod_sparse.memories.conef import Contractive
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import one_of
from horovod_sparse.rules.states import require_positions
from horovod_sparse.vector import SparseVector


class ImprovedContractive(Contractive):
    """Improved contractive error feedback: p = g + e + q, where q' = C(p - D - e') compresses what e' misses of p - D.

    Version 1: e' = C(p - D), with a second error compressor. Version 2: e' = Q(p - D), the largest entries of the
    error, uncompressed, up to the number of entries sent. If q is a sketch, e' is selected from the part of the error
    that q does not hold yet, so that nothing is held twice.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Options of improved ConEF.

        Attributes:
            version: 1 (quantization only) or 2.

        Raises:
            ValueError: A value is out of range, or version 1 is combined with a sketch.
        """

        version: int = one_of(2, 1, 2)

        def __post_init__(self) -> None:
            """Check the fields, and that the version works with the compressor."""
            super().__post_init__()
            if self.version == 1 and self.compressor == "sketch":
                raise ValueError(
                    "version 1 does not work with compressor 'sketch': the error of a sketch is larger than its input, "
                    "so two sketches that feed back each other's errors grow without bound: use "
                    "compressor='quantize', or version=2"
                )

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(context, options)
        # e: an error compressor in version 1, entries in version 2. The base class holds q.
        self._first = compressor_for(context, options, part=1) if options.version == 1 else None
        self._entries = SparseVector.empty(context.size, context.like)

    def open(self, step: Step, scale: float) -> Accumulator:
        """Decode e + q into the scratch buffer that all buckets share."""
        accumulator = super().open(step, scale)
        buffer, entries = accumulator.buffer, self._entries
        if self._first is not None:
            self._first.decode(buffer, scale, add=True)
        kernels_for(buffer).add(entries.indices, entries.values * buffer.dtype.type(scale), buffer)
        return accumulator

    def _set_apart(self, accumulator: Accumulator, vector: SparseVector, gone: Indices) -> None:
        """Compress the error as e, and leave what this misses in the buffer."""
        if self._first is not None:
            self._first.rescale(self._scale)
            self._first.update(accumulator.buffer, gone, 1.0, self._step)
            self._first.decode(accumulator.buffer, -1.0, add=True)
        else:
            self._entries = self._take_entries(accumulator, 0 if vector.indices is None else len(vector), gone)

    def _take_entries(self, accumulator: Accumulator, k: int, gone: Indices) -> SparseVector:
        """Take the k largest entries that q does not hold yet out of the buffer, except at the positions ``gone``."""
        buffer = accumulator.buffer
        came_back = buffer[gone]
        if self._error.carries:
            self._error.decode(buffer, -1.0, add=True)
        buffer[gone] = 0
        entries = accumulator.take_largest(min(k, accumulator.size // 2))
        if self._error.carries:
            self._error.decode(buffer, 1.0, add=True)
        buffer[gone] = came_back
        return entries

    def state_dict(self) -> dict[str, Any]:
        """Return both parts of the error, not copied."""
        entries = self._entries
        return {
            "error": {} if self._first is None else self._first.state_dict(),
            "indices": entries.indices,
            "values": entries.values,
            "rest": self._error.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict`` of the same version; ValueError if it does not fit."""
        if state["indices"].size != state["values"].size:
            raise ValueError(f"{state['values'].size} values do not match {state['indices'].size} indices of entries")
        require_positions(state["indices"], self._context.size, "indices of entries")
        if self._first is not None:
            self._first.load_state_dict(state["error"])
        indices, values = (to_device(state[key].copy(), self._context.like) for key in ("indices", "values"))
        self._entries = SparseVector(indices, values, self._context.size)
        self._error.load_state_dict(state["rest"])

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge e and q separately; entries at the same position are added."""
        size = self._context.size
        nothing = SparseVector.empty(size, np.empty(0, self._context.like.dtype))
        entries = nothing.plus(*(SparseVector(state["indices"], state["values"], size) for state in states))
        return {
            "error": {} if self._first is None else self._first.merge([state["error"] for state in states]),
            "indices": entries.indices,
            "values": entries.values,
            "rest": self._error.merge([state["rest"] for state in states]),
        }
