"""Argument checks and launches of CUDA kernels on CuPy's current stream; nothing here synchronizes."""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

import cupy
import numpy as np

from horovod_sparse.kernels.cuda.compilation import load
from horovod_sparse.kernels.types import MAX_SIZE, Array, Segments

THREADS = 256  # per block

_SEGMENT = np.dtype(
    [("data", np.uint64), ("start", np.int32), ("length", np.int32), ("before", np.int32), ("format", np.int32)]
)
# CuPy has no bfloat16: bfloat16 values are passed as their bits, uint16.
_FORMATS = {np.dtype(name): number for number, name in enumerate(["float32", "float16", "uint16", "float64"])}
_NULL = np.uint64(0)
_REALS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


MODULES: list[Module] = []  # complete once horovod_sparse.kernels.cuda is imported


class Module:
    """Kernels of one file.

    Args:
        name: Name of the file in csrc/cuda, without its suffix.
        templates: Names of kernels in the namespace hvs that are templates over float and double.
        plain: Names of kernels that are not templates, and of instances such as ``name<3, float>``.
    """

    def __init__(self, name: str, templates: Sequence[str] = (), plain: Sequence[str] = ()) -> None:
        self.name = name
        self.kernels = [f"hvs::{kernel}<{real}>" for kernel in templates for real in _REALS.values()]
        self.kernels += [f"hvs::{kernel}" for kernel in plain]
        MODULES.append(self)

    @functools.cache  # noqa: B019 - there is one module per file
    def _functions(self, device: int) -> dict[str, Any]:
        del device  # load uses the current device
        return load(self.name, self.kernels)

    def launch(self, kernel: str, blocks: int, *arguments: Any, threads: int = THREADS) -> None:
        """Launch a kernel; do nothing if there are no blocks.

        Args:
            kernel: Name of the kernel, with its template arguments.
            blocks: Number of blocks of the grid.
            *arguments: CuPy arrays (passed as addresses), None (passed as a null pointer) and NumPy scalars.
            threads: Number of threads per block.
        """
        if blocks > 0:
            given = tuple(_NULL if x is None else x for x in arguments)  # CuPy would omit a None
            self._functions(cupy.cuda.Device().id)[f"hvs::{kernel}"]((blocks,), (threads,), given)


def real_of(array: Array) -> str:
    """Return the C++ type of a float32 or float64 array."""
    return _REALS[array.dtype]


def address(array: Array) -> int:
    """Return the device address of an array."""
    pointer: int = array.data.ptr  # type: ignore[attr-defined]  # CuPy only
    return pointer


def blocks_for(items: int, per_block: int = THREADS) -> int:
    """Return the number of blocks for a number of items, rounded up."""
    return -(-items // per_block)


def multiprocessors() -> int:
    """Return the number of multiprocessors of the current device."""
    return _multiprocessors(cupy.cuda.Device().id)


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def zeros(count: int, dtype: Any) -> Any:
    """Return a CuPy array of zeros, set without a kernel."""
    array = cupy.empty(count, dtype)
    array.data.memset_async(0, array.nbytes)
    return array


def instances(kernels: Sequence[str], options: Sequence[int]) -> list[str]:
    """Return the names of kernel instances for float and double, combined with each integer option."""
    return [f"{kernel}<{real}, {option}>" for kernel in kernels for real in _REALS.values() for option in options]


# --- arguments -----------------------------------------------------------------------------------------------------


def _is_cupy(array: object) -> bool:
    return isinstance(array, cupy.ndarray)


def _is_unaligned(array: Array) -> bool:
    """Return whether the array is misaligned; a kernel that read it would invalidate the process's CUDA context."""
    return bool(array.size) and address(array) % array.itemsize != 0


def _is_strided(array: Array) -> bool:
    """Return whether ``check_array`` would accept a contiguous copy of the array, but not the array."""
    return _is_cupy(array) and array.ndim == 1 and not array.flags.c_contiguous and not _is_unaligned(array)


def check_array(array: Array, name: str) -> Array:
    """Return the array if it is a contiguous, aligned, one-dimensional CuPy array of fewer than 2**31 elements.

    Raises:
        TypeError: The array is not a CuPy array.
        ValueError: Its shape, layout or size is unsuitable.
    """
    if not _is_cupy(array):
        raise TypeError(f"{name}: expected a CuPy array, not {type(array).__module__}.{type(array).__name__}")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, not {array.ndim}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: must be contiguous")
    check_size(array.size, name)
    if _is_unaligned(array):
        raise ValueError(f"{name}: must be aligned to its elements")
    return array


def check_real(array: Array, name: str) -> Array:
    """Return the array if ``check_array`` accepts it and its dtype is float32 or float64."""
    if check_array(array, name).dtype not in _REALS:
        raise ValueError(f"{name}: dtype {array.dtype} is neither float32 nor float64")
    return array


def check_dtype(array: Array, name: str, dtype: Any = np.int32) -> Array:
    """Return the array if ``check_array`` accepts it and its dtype is the given one."""
    if check_array(array, name).dtype != dtype:
        raise ValueError(f"{name}: dtype {array.dtype} is not {np.dtype(dtype)}")
    return array


def check_vector(indices: Any, values: Array, name: str) -> tuple[Array, Array]:
    """Return the indices and values of a sparse vector after checking dtypes and lengths."""
    if indices is None:
        raise ValueError(f"{name}: has no indices; pass a sparse vector")
    indices, values = check_dtype(indices, f"{name}: indices"), check_real(values, f"{name}: values")
    if indices.size != values.size:
        raise ValueError(f"{name}: {indices.size} indices, but {values.size} values")
    return indices, values


def check_size(size: int, name: str = "size") -> None:
    """Raise ValueError unless the size is 0 .. 2**31 - 1."""
    if size < 0:
        raise ValueError(f"{name} must not be negative, but is {size}")
    if size > MAX_SIZE:
        raise ValueError(f"{name}: {size} elements, but indices are int32: use buckets of less than 2**31")


def check_scale(scale: float, buffer: Array, name: str = "scale") -> Any:
    """Return a factor in the buffer's dtype; raise ValueError unless it is finite."""
    if not math.isfinite(scale):
        raise ValueError(f"{name} must be finite, not {scale}")
    return buffer.dtype.type(scale)


def check_seed(seed: int) -> Any:
    """Return a seed as a kernel argument; raise ValueError unless it is 0 .. 2**63 - 1."""
    if seed < 0:
        raise ValueError(f"seed must not be negative, but is {seed}")
    if seed >= 2**63:
        raise ValueError(f"seed must be less than 2**63, not {seed}")
    return np.uint64(seed)


class Table:
    """Table of segments in the layout that the kernels read.

    Args:
        segments: Pairs (start, array), ascending and disjoint. Non-contiguous arrays are copied.
        size: Number of positions of the bucket.
        writable: Whether the kernels write to the arrays, which must then be contiguous.

    Attributes:
        device: The table in device memory.
        count: Number of nonempty segments, as a kernel argument.
        active: Number of positions that the segments cover.

    Raises:
        TypeError: A segment is not a CuPy array.
        ValueError: A segment's array or position is unsuitable.
    """

    def __init__(self, segments: Segments, size: int, *, writable: bool = False) -> None:
        rows: list[tuple[int, ...]] = []
        self._arrays: list[Array] = []  # keeps copies alive as long as the table
        self.active, stop = 0, 0
        for number, (start, array) in enumerate(segments):
            name = f"segment {number}"
            if not writable and _is_strided(array):
                array = cupy.ascontiguousarray(array)
            check_array(array, name)
            if array.dtype not in _FORMATS:
                raise ValueError(f"{name}: dtype {array.dtype} is not float32, float16, bfloat16 (uint16) or float64")
            if start < stop:
                raise ValueError(
                    f"{name}: starts at {start}, before {stop}, the end of the previous one; segments must ascend and "
                    "not overlap"
                )
            stop = start + array.size
            if stop > size:
                raise ValueError(f"{name}: ends at {stop}, but the bucket has {size} positions")
            if array.size:
                rows.append((address(array), start, array.size, self.active, _FORMATS[array.dtype]))
            self._arrays.append(array)
            self.active += array.size
        self.device = upload(np.array(rows, _SEGMENT).view(np.uint8))
        self.count = np.int32(len(rows))


_Key: TypeAlias = tuple[int, int, bytes]
_MOST_TABLES = 256
_lock = threading.Lock()
_uploaded: OrderedDict[_Key, tuple[Array, Array, Any]] = OrderedDict()


def upload(host: Array) -> Array:
    """Copy a small uint8 array to the device asynchronously, or return the cached copy of the same content.

    Gradients mostly keep their addresses from step to step, so their tables stay the same. The host memory is pinned: a
    copy from pageable memory would be synchronous, and could not be part of a CUDA graph.
    """
    key = (cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr, host.tobytes())
    with _lock:
        if key in _uploaded:
            _uploaded.move_to_end(key)
            return _uploaded[key][1]
    device: Array = cupy.empty(max(host.size, 1), np.uint8)
    if not host.size:
        return device
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(host.nbytes), np.uint8, host.size)
    pinned[...] = host
    device.set(  # type: ignore[attr-defined]  # CuPy only
        pinned, stream=cupy.cuda.get_current_stream()
    )
    copied = cupy.cuda.Event(disable_timing=True)
    copied.record(cupy.cuda.get_current_stream())
    with _lock:
        _uploaded[key] = (pinned, device, copied)
        # Released pinned memory is reused at once, so it is released only after its copy has completed.
        while len(_uploaded) > _MOST_TABLES and next(iter(_uploaded.values()))[2].done:
            _uploaded.popitem(last=False)
    return device
