"""Device code under every stage: one module per device, all with the functions of ``Kernels``."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.protocol import Kernels
from horovod_sparse.kernels.types import Array, Segments

if TYPE_CHECKING:
    from horovod_sparse.kernels import cpu, cuda

    _CPU: Kernels = cpu
    _CUDA: Kernels = cuda

__all__ = [
    "Kernels",
    "add_to",
    "copied",
    "copy_to_host",
    "cpu",
    "cuda",
    "joined",
    "kernels_for",
    "largest_magnitude",
    "packed",
    "to_device",
    "to_host",
]

_kernels: dict[type, Kernels] = {}  # by the type of the array


def __getattr__(name: str) -> Any:
    """Load a device's module on first use: a machine may have the libraries of one device only."""
    if name not in ("cpu", "cuda"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def kernels_for(array: Any) -> Kernels:
    """Return the kernels for an array; the only function that asks for its device.

    Raises:
        ImportError: The module for this device was not built.
        TypeError: The array is neither NumPy's nor CuPy's.
    """
    kind = type(array)
    return _kernels.get(kind) or _load(kind)


def _load(kind: type) -> Kernels:
    if issubclass(kind, np.ndarray):
        device = "cpu"
    elif kind.__module__.partition(".")[0] == "cupy":
        device = "cuda"
    else:
        raise TypeError(f"expected a NumPy or CuPy array, not {kind.__module__}.{kind.__name__}")
    _kernels[kind] = kernels = cast(Kernels, importlib.import_module(f"{__name__}.{device}"))
    return kernels


def to_host(array: Any) -> NDArray[Any]:
    """Return a NumPy array with the content of an array of any device; a NumPy array is returned as is."""
    return array if isinstance(array, np.ndarray) else array.get()


def copy_to_host(array: Any) -> NDArray[Any]:
    """Return a new NumPy array with the content of an array of any device."""
    copy: NDArray[Any] = array.copy() if isinstance(array, np.ndarray) else array.get()
    return copy


def add_to(total: Any, values: Any) -> Array:
    """Add values to an array, and return it; on a device by our kernel, where CuPy would compile one."""
    if isinstance(total, np.ndarray) or total.dtype not in (np.float32, np.float64):
        total += values
    else:
        kernels_for(total).add(None, values, total)
    result: Array = total
    return result


def copied(array: Array) -> Array:
    """Return a copy of a contiguous array; on a device it is a copy of memory, for which CuPy compiles no kernel."""
    copy = np.empty_like(array)
    copy[...] = array
    return copy


def joined(parts: Sequence[Any], out: Array | None = None) -> Array:
    """Concatenate contiguous arrays of one dtype, as ``np.concatenate``; on a device by copies of memory."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, out=out)
    total = np.empty_like(parts[0], shape=(sum(part.size for part in parts),)) if out is None else out
    end = 0
    for part in parts:
        begin, end = end, end + part.size
        total[begin:end] = part
    return total


def to_device(array: Any, like: Array) -> Array:
    """Return the content of a NumPy array on the device of another array; on the host, the array itself."""
    return np.asarray(array, like=like)


def packed(gradients: Segments, values: Array) -> Array:
    """Write gradients into an array of the bucket's size and dtype, with zeros in the gaps, and return it."""
    if sum(array.size for _, array in gradients) == values.size and all(a.dtype == values.dtype for _, a in gradients):
        for start, array in gradients:
            values[start : start + array.size] = array
    else:
        values[...] = 0
        kernels_for(values).accumulate(gradients, values)
    return values


def largest_magnitude(array: Array) -> float:
    """Return the largest magnitude of an array or a tensor: 0 if it is empty, infinity if it contains NaN."""
    if type(array).__module__.partition(".")[0] == "cupy" and array.dtype.kind == "f":
        return kernels_for(array).largest([(0, array.reshape(-1))])
    if 0 in array.shape:
        return 0.0
    magnitude = float(max(array.max(), -array.min()))  # without a copy of the array
    return magnitude if magnitude == magnitude else np.inf
