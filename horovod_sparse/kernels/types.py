"""Names of the arrays that kernels take; the same for every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# NumPy or CuPy arrays; CuPy follows NumPy's interface, so one name serves both.
Array: TypeAlias = NDArray[Any]
# int32, ascending and unique.
Indices: TypeAlias = NDArray[np.int32]
# (start, flat array) pairs, ascending and disjoint: the array covers start .. start + len(array) of the bucket.
# Positions that no segment covers are held: they are neither added to nor selected from.
Segments: TypeAlias = Sequence[tuple[int, Array]]
