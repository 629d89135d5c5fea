"""Sums that would overflow are foreseen: by an upper bound of what a memory holds, which costs no pass over it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from horovod_sparse.kernels import largest_magnitude
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import BucketContext

_LOG = logging.getLogger("horovod_sparse")
# What a step may leave, as a multiple of the largest magnitude that it found: improved error feedback holds an error,
# and the error of that one.
_GROWTH = 4.0
# A scale of quantized values stands for as many times itself.
_LEVELS = 128.0
# Also of float64 buckets: quantization and the wire hold their values as float32.
_LARGEST = float(np.finfo(np.float32).max)


class Headroom:
    """Tells whether a sum in it could overflow, on this rank or over the ranks.

    The bound grows by a generous factor in each step, whatever the memory does. When it comes near to an overflow, the
    memory is measured, and the bound is what it holds: as a rule once in some ten to forty steps, as magnitudes are far
    from the largest float.

    Args:
        context: The bucket and the rank.
        memory: That of the bucket.
    """

    def __init__(self, context: BucketContext, memory: Any) -> None:
        self._context = context
        self._memory = memory
        self._growth = _GROWTH * context.ranks  # what comes back from the other ranks may be the sum of a node
        self._limit = _LARGEST / (_LEVELS * self._growth)
        self._held = 0.0  # nothing so far; infinity: not known

    def suffices(self, largest: float, elements: int, factor: float) -> bool:
        """Tells whether factor * memory + gradients can be added up. A memory that itself is too large is emptied.

        Args:
            largest: The gradients' largest magnitude; one that is not finite does not fit.
            elements: Their number.
            factor: The largest one on what the memory holds.
        """
        gradients = largest * elements  # at least the sum of their magnitudes, as a sketch adds them up
        factor = max(factor, 1.0)  # another rank may keep this one from taking the step
        if not self._fits(gradients, factor):
            self._held = max((largest_magnitude(array) for array in _arrays(self._memory.state_dict())), default=0.0)
            if not self._fits(0.0, factor):
                self._empty()
            if not self._fits(gradients, factor):
                return False
        self._held = self._growth * (factor * self._held + gradients)
        return True

    def holds(self, magnitude: float) -> bool:
        """Tells whether a step can go on when everything has been added up.

        Args:
            magnitude: The largest one of the sums; infinity does not fit.
        """
        if not magnitude <= self._limit:
            return False
        self._held = self._growth * magnitude
        return True

    def _fits(self, gradients: float, factor: float) -> bool:
        return factor * max(self._held, 1.0) + gradients <= self._limit  # false for NaN

    def _empty(self) -> None:
        context = (self._context.rank, self._context.bucket, self._held)
        _LOG.warning("rank %d: bucket %d: what was held back reaches %.3g, too large to be sent, and is lost", *context)
        for array in _arrays(self._memory.state_dict()):
            array.fill(0)
        self._held = 0.0

    def forget(self) -> None:
        """The memory holds something else now."""
        self._held = math.inf


def _arrays(state: Mapping[str, Any]) -> Iterator[Array]:
    for value in state.values():
        if isinstance(value, Mapping):
            yield from _arrays(value)
        elif getattr(value, "dtype", None) is not None and value.dtype.kind == "f" and value.size:
            yield value
