"""Device code under every stage: one module per device, all with the same functions."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.types import Array

if TYPE_CHECKING:
    from horovod_sparse.kernels import cpu, cuda

__all__ = ["copy_to_host", "cpu", "cuda", "kernels_for", "largest_magnitude", "to_device", "to_host"]


def __getattr__(name: str) -> ModuleType:
    """Loads a device's module on first use: a machine may have only one of the devices' libraries."""
    if name not in ("cpu", "cuda"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def kernels_for(array: Any) -> ModuleType:
    """The module whose functions work on this array; the only place that asks which device an array is on.

    Raises:
        ImportError: The module for this device was not built.
        TypeError: It is no array of a known library.
    """
    if isinstance(array, np.ndarray):
        return importlib.import_module("horovod_sparse.kernels.cpu")
    if type(array).__module__.partition(".")[0] == "cupy":
        return importlib.import_module("horovod_sparse.kernels.cuda")
    raise TypeError(f"expected a NumPy or CuPy array, not {type(array).__module__}.{type(array).__name__}")


def to_host(array: Any) -> NDArray[Any]:
    """A NumPy array with the content of an array of any device; the array itself where it is NumPy's."""
    host: NDArray[Any] = array if isinstance(array, np.ndarray) else array.get()
    return host


def copy_to_host(array: Any) -> NDArray[Any]:
    """A NumPy array of its own with the content of an array of any device."""
    copy: NDArray[Any] = array.copy() if isinstance(array, np.ndarray) else array.get()
    return copy


def to_device(array: Any, like: Array) -> Array:
    """A NumPy array's content on the device of another array; the array itself where that is the host."""
    return np.asarray(array, like=like)


def largest_magnitude(array: Array) -> float:
    """The largest magnitude of an array of any device: 0 where it is empty, infinity where there is NaN."""
    if not array.size:
        return 0.0
    magnitude = float(max(array.max(), -array.min()))  # without a copy of the array
    return magnitude if magnitude == magnitude else np.inf
