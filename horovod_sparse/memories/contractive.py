"""Contractive error feedback: the residual itself is compressed (ConEF, Li et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels.types import Segments
from horovod_sparse.memories.delivered import delivered
from horovod_sparse.memories.errorcompressor import make
from horovod_sparse.place import Place
from horovod_sparse.scratch import SCRATCH
from horovod_sparse.vector import SparseVector


class Contractive:
    """e' = C(p - D) with p = g + e, where D was sent and C is an unbiased error compressor.

    Only the compressed error lasts from step to step. In a step, one buffer of the largest bucket's size is in use,
    whatever the number of buckets.

    Args:
        place: The bucket and the rank.
        compressor: ``sketch``, a count sketch, or ``quantize``, stochastic quantization.
        saving: Share of a residual's memory that a sketch saves, in (0, 1).
        rows: Hashes of the sketch, 1, 3 or 5.
        bits: Bits per element of the quantization, 4 or 8.
        seed: Of the hash or of the rounding.

    Raises:
        ValueError: A name is unknown, an option is out of range, or the bucket is too small.
    """

    _beta = 0.0  # share of the error that is not fed back; of the subclass

    def __init__(
        self,
        place: Place,
        *,
        compressor: str = "sketch",
        saving: float = 0.6,
        rows: int = 1,
        bits: int = 8,
        seed: int = 0,
    ) -> None:
        self._place = place
        self._scale = 1.0
        self._error = make(place, compressor, saving=saving, rows=rows, bits=bits, seed=seed)

    def open(self, gradients: Segments, scale: float) -> Accumulator:
        """Writes the error out into a buffer that is shared with the other buckets."""
        self._scale = scale
        buffer = SCRATCH.take(self._place.size, self._place.like)
        self._error.decode(buffer, scale * (1 - self._beta))
        return Accumulator(buffer, gradients)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Compresses what was not taken and what came back."""
        accumulator.settle()
        accumulator.put_back(returned)
        self._error.rescale(self._scale)
        gone = delivered(accumulator, vector, returned)
        self._error.update(accumulator.buffer, gone, carried=1 - self._beta)
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
