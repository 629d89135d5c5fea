"""Names of what kernels take and return; the same for every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Elements of a bucket at most: indices are int32.
MAX_SIZE = 2**31 - 1

# NumPy or CuPy arrays; CuPy follows NumPy's interface, so one name serves both.
Array: TypeAlias = NDArray[Any]
# int32, ascending and unique.
Indices: TypeAlias = NDArray[np.int32]
# (start, flat array) pairs, ascending and disjoint: the array covers start .. start + len(array) of the bucket.
# Positions that no segment covers are held: they are neither added to nor selected from.
Segments: TypeAlias = Sequence[tuple[int, Array]]


class Velocity(NamedTuple):
    """Momentum on the way: u <- momentum * u + share * gradient, and u is added in the gradient's place.

    Attributes:
        values: u, in the dtype of the buffer, [n]; changed in place inside the segments.
        momentum: Finite factor, rounded to the buffer's dtype.
        share: Of the gradient; the same.
        nesterov: gradient + momentum * u is added instead of u.
    """

    values: Array
    momentum: float
    share: float = 1.0
    nesterov: bool = False


class Moments(NamedTuple):
    """Sums over the positions of a bucket that are inside its segments; without any, all of them are zero.

    Attributes:
        count: How many positions.
        sum: Sum of their values; this and the following in float64, NaN where a value is.
        squares: Sum of the squares.
        magnitudes: Sum of the magnitudes.
        largest: Largest magnitude.
    """

    count: int  # type: ignore[assignment]  # a tuple's own count() is not what anybody wants here
    sum: float
    squares: float
    magnitudes: float
    largest: float
