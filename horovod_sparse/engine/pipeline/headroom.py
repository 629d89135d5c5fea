"""Prediction of overflowing sums, from an upper bound on a memory's content that needs no pass over it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from horovod_sparse.kernels import largest_magnitude
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import BucketContext, SparseVector

_LOG = logging.getLogger("horovod_sparse")
# What a step may leave in the memory, as a multiple of the largest magnitude in its sums: improved error feedback holds
# an error, and the error of that error.
_GROWTH = 4.0
# A quantized value is up to this many times its scale.
_LEVELS = 32768.0
# How much factors may raise what was received before the memory is measured.
_RAISE = 64.0
# Applies to float64 buckets, too: quantization and the wire hold their values as float32.
_LARGEST = float(np.finfo(np.float32).max)


class Headroom:
    """Upper bound on a memory's content; decides whether sums could overflow, on this rank or over the ranks.

    The bound grows by a generous factor in each step, regardless of the memory. When it gets close to an overflow, the
    memory is measured and the bound set to its content. This usually happens once in fifty steps, as magnitudes are far
    below the largest float.

    The bound leaves out what exchanges return to this rank, which may be sums of other ranks' much larger entries:
    measuring them would wait for the device in every step. Each of these ranks keeps its own limit, so that they fit
    until the memory is measured, unless factors raise them a lot before that: then it is measured at once.

    Args:
        context: The bucket and the rank.
        memory: The memory of the bucket.
    """

    def __init__(self, context: BucketContext, memory: Any) -> None:
        self._context = context
        self._memory = memory
        self._limit = _LARGEST / (_LEVELS * _GROWTH * context.ranks)
        self._held = 0.0  # bound on the memory's magnitudes; infinity: not known
        self._received = False  # whether exchanges have returned anything since the memory was measured
        self._raised = 1.0  # product of the factors since then

    def suffices(self, largest: float, elements: int, factor: float) -> bool:
        """Return whether factor * memory + gradients can be summed; a memory that is too large itself is emptied.

        Args:
            largest: Largest magnitude of the gradients; False is returned if it is not finite.
            elements: Number of gradient entries.
            factor: Largest factor that is applied to the memory's content.
        """
        gradients = largest * elements  # bounds the sum of their magnitudes, as a sketch adds them up
        factor = max(factor, 1.0)  # the memory keeps its content if another rank prevents the step
        self._raised *= factor
        if (self._received and self._raised > _RAISE) or not self._fits(gradients, factor):
            self._received, self._raised = False, 1.0
            self._held = max((largest_magnitude(array) for array in _arrays(self._memory.state_dict())), default=0.0)
            if not self._fits(0.0, factor):
                self._empty()
            if not self._fits(gradients, factor):
                self._held *= factor  # the step may multiply the memory even if it does not add the gradients
                return False
        self._held = _GROWTH * (factor * self._held + gradients)
        return True

    def holds(self, magnitude: float) -> bool:
        """Return whether a step can continue after everything has been summed.

        Args:
            magnitude: Largest magnitude of the sums; False is returned if it is not finite.
        """
        if not magnitude <= self._limit:
            return False
        self._held = _GROWTH * magnitude
        return True

    def receives(self, returned: SparseVector) -> None:
        """Note what an exchange returns to this rank."""
        self._received = self._received or returned.values.size > 0

    def _fits(self, gradients: float, factor: float) -> bool:
        return factor * max(self._held, 1.0) + gradients <= self._limit  # false for NaN

    def _empty(self) -> None:
        context = (self._context.rank, self._context.bucket, self._held)
        _LOG.warning("rank %d: bucket %d: the residual reaches %.3g, too large to be sent, and is dropped", *context)
        for array in _arrays(self._memory.state_dict()):
            array.fill(0)
        self._held = 0.0

    def forget(self) -> None:
        """Forget the bound, as the memory's content has been replaced."""
        self._held = math.inf


def _arrays(state: Mapping[str, Any]) -> Iterator[Array]:
    for value in state.values():
        if isinstance(value, Mapping):
            yield from _arrays(value)
        elif getattr(value, "dtype", None) is not None and value.dtype.kind == "f" and value.size:
            yield value
