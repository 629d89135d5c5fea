"""What the memories of several ranks hold together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.types import Array


def total(arrays: Sequence[Array], like: Array) -> NDArray[np.floating]:
    """The sum of arrays, in the order given; zeros where there are none.

    Args:
        arrays: NumPy arrays.
        like: Array of any device with the shape and dtype that they must have.

    Raises:
        ValueError: One has another shape or dtype.
    """
    result = np.zeros(like.shape, like.dtype)
    for array in arrays:
        if array.shape != like.shape or array.dtype != like.dtype:
            raise ValueError(
                f"an array of shape {array.shape} and dtype {array.dtype} does not fit one of shape {like.shape} and "
                f"dtype {like.dtype}: load the state with the model, configuration and bucket size it was saved with"
            )
        result += array
    return result
