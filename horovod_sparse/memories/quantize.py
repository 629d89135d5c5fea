"""Stochastic quantization: an unbiased error compressor (Alistarh et al., "QSGD", NIPS 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.kernels import kernels_for, to_device
from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.memories.base import require_fit
from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.states import checked_number


class Quantization:
    """Error compressor with codes of 4, 8 or 16 bits and one scale per block; rounds each value up or down at random.

    Args:
        context: The bucket and the rank.
        bits: Bits per element: 4, 8 or 16.
        seed: Seed of the random rounding, which is independent between ranks, buckets and steps.
        part: Number of this error compressor within its bucket; part of the seed.
    """

    carries = False  # ``update`` encodes the buffer

    def __init__(self, context: BucketContext, bits: int, seed: int, part: int) -> None:
        self._kernels = kernels_for(context.like)
        self._context = context
        self._bits, self._seed, self._part = bits, seed, part
        self._encode(np.zeros(context.size, context.like.dtype, like=context.like), 0)

    def _encode(self, buffer: Array, step: int) -> None:
        self._codes, self._scales = self._kernels.quantize(buffer, self._bits, self._seed_of(step))
        self._factor = 1.0

    def _seed_of(self, step: int) -> int:
        context = self._context
        key = np.random.SeedSequence([self._seed, context.bucket, context.rank, self._part, step])
        return int(key.generate_state(1, np.uint64)[0] >> 1)

    def rescale(self, factor: float) -> None:
        """Multiply the held vector by a factor; 0 clears it."""
        self._factor *= factor

    def decode(self, buffer: Array, factor: float, *, add: bool = False) -> None:
        """Set the buffer to factor * the held vector, or add that to it."""
        self._kernels.dequantize(self._codes, self._scales, buffer, self._bits, factor * self._factor, add=add)

    def update(self, buffer: Array, delivered: Indices, carried: float, step: int) -> None:
        """Encode the buffer, after adding (1 - carried) * the held vector to it; arguments: see ``CountSketch``."""
        del delivered  # these entries have already left the buffer
        if carried != 1:
            self.decode(buffer, 1 - carried, add=True)
        self._encode(buffer, step)

    def state_dict(self) -> dict[str, Any]:
        """Return codes and scales, not copied, and the factor applied since they were encoded."""
        return {"codes": self._codes, "scales": self._scales, "factor": self._factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``; ValueError if its size or factor is invalid."""
        require_fit(state["codes"], self._codes)
        require_fit(state["scales"], self._scales)
        self._codes = to_device(state["codes"].copy(), self._codes)
        self._scales = to_device(state["scales"].copy(), self._scales)
        self._factor = checked_number(state["factor"], "factor of the quantized error")

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Decode, add and encode the states, which rounds once more; a single state is returned unchanged."""
        if len(states) == 1:
            return states[0]
        buffer = np.zeros(self._context.size, self._context.like.dtype)
        kernels = kernels_for(buffer)
        for state in states:
            require_fit(state["codes"], self._codes)
            kernels.dequantize(state["codes"], state["scales"], buffer, self._bits, float(state["factor"]), add=True)
        codes, scales = kernels.quantize(buffer, self._bits, self._seed_of(0))  # no later step draws these numbers
        return {"codes": codes, "scales": scales, "factor": 1.0}
