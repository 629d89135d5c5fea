"""Random block-k: k consecutive positions from a random start that all ranks share."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.sparsifiers.consensus import Consensus
from horovod_sparse.vector import SparseVector


class RandomBlock:
    """Takes k consecutive positions, which wrap around at the end; the same on every rank.

    Positions that are held for now stay in the memory and travel as zeros.

    Args:
        seed: Of this sparsifier's own generator; global generators are neither used nor changed.
    """

    shares_indices = True

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._step = 0

    def take(self, accumulator: Accumulator, k: int, consensus: Consensus) -> SparseVector:
        """Moves the block out of the accumulator."""
        del consensus  # the seed and the step are the same on every rank
        buffer, size = accumulator.settle(), accumulator.size
        start = int(np.random.default_rng([self._seed, self._step]).integers(max(size, 1)))
        self._step += 1
        positions = np.sort(np.arange(start, start + min(k, size), dtype=np.int64) % max(size, 1)).astype(np.int32)
        values = np.zeros(positions.size, buffer.dtype, like=buffer)
        for begin, gradient in accumulator.gradients:
            part = slice(*np.searchsorted(positions, [begin, begin + gradient.size]))
            values[part] = buffer[positions[part]]
            buffer[positions[part]] = 0
        return SparseVector(positions, values, size, shared=True)

    def state_dict(self) -> dict[str, Any]:
        """The number of the step, which with the seed names the next block."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        self._step = int(state["step"])
