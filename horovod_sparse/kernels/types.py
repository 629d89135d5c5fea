"""Types that kernels take and return, the same for every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

# Maximum number of elements of a bucket: indices are int32.
MAX_SIZE = 2**31 - 1

# NumPy or CuPy arrays; CuPy follows NumPy's interface.
Array: TypeAlias = NDArray[Any]
# int32, ascending and unique.
Indices: TypeAlias = NDArray[np.int32]
# (start, flat array) pairs, ascending and disjoint: the array covers start .. start + len(array) of the bucket.
# Positions that no segment covers are held: they are neither added to nor selected from.
Segments: TypeAlias = Sequence[tuple[int, Array]]


class Velocity(NamedTuple):
    """Momentum applied during accumulation: u <- momentum * u + share * gradient.

    fresh * gradient + weight * u is added instead of the gradient; by default u.

    Attributes:
        values: The velocity u in the dtype of the buffer, [n]; modified inside the segments.
        momentum: Finite factor on u, rounded to the buffer's dtype.
        share: Finite factor on the gradient, rounded to the buffer's dtype.
        fresh: Finite factor on the gradient in what is added, rounded likewise.
        weight: Finite factor on u in what is added, rounded likewise.
    """

    values: Array
    momentum: float
    share: float = 1.0
    fresh: float = 0.0
    weight: float = 1.0


class Accumulation(TypedDict, total=False):
    """Keyword arguments of the kernels that accumulate.

    Attributes:
        source: Array to scale, in the buffer's dtype [n]; not modified. None, the default: the buffer itself.
        clear: Set the gradients to zero in the same pass; they must then be contiguous and writable. Default: False.
        velocity: Momentum to apply to the gradients first, in the same pass. Default: None.
    """

    source: Array | None
    clear: bool
    velocity: Velocity | None


class Moments(NamedTuple):
    """Sums over the positions of a bucket inside its segments; all are zero if there are none.

    Attributes:
        count: Number of positions.
        sum: Sum of the values; this and the following in float64, NaN if a value is NaN.
        squares: Sum of the squares.
        magnitudes: Sum of the magnitudes.
        largest: Largest magnitude.
    """

    count: int  # type: ignore[assignment]  # shadows tuple.count
    sum: float
    squares: float
    magnitudes: float
    largest: float
