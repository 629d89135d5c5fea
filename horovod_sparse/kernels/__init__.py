"""Device code under every stage: one module per device, all with the same functions."""

from types import ModuleType
from typing import Any

import numpy as np

from horovod_sparse.kernels import cpu

__all__ = ["cpu", "kernels_for"]


def kernels_for(array: Any) -> ModuleType:
    """The module whose functions work on this array; the only place that asks which device an array is on.

    Raises:
        RuntimeError: The array is CuPy's: this version has no CUDA kernels.
        TypeError: It is no array of a known library.
    """
    if isinstance(array, np.ndarray):
        return cpu
    if type(array).__module__.partition(".")[0] == "cupy":
        raise RuntimeError("CuPy arrays need CUDA kernels, which this version lacks; use NumPy arrays (array.get())")
    raise TypeError(f"expected a NumPy array, not {type(array).__module__}.{type(array).__name__}")
