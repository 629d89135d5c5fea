"""No error feedback: the rest is dropped. The baseline that shows why feedback is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels.types import Segments
from horovod_sparse.place import Place
from horovod_sparse.scratch import SCRATCH
from horovod_sparse.state import Stateless
from horovod_sparse.vector import SparseVector


class NoMemory(Stateless):
    """Forgets what was not sent; its buffer is scratch for the selection.

    Args:
        place: The bucket and the rank.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def open(self, gradients: Segments, scale: float) -> Accumulator:
        """Accumulates the gradients alone: scale 0 ignores the buffer's old content."""
        del scale
        return Accumulator(SCRATCH.take(self._place.size, self._place.like), gradients, scale=0.0)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """Drops the rest and what came back."""
        del vector, returned
        SCRATCH.give_back(accumulator.buffer)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Nothing was held."""
        del states
        return {}
