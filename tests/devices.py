"""Arrays on the device, for tests that run on a GPU or with an emulation of CuPy.

Import this module before CuPy: without a GPU, it replaces CuPy by the emulation.
"""

# ruff: noqa: E402 - the choice of CuPy must precede the imports

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any


def has_gpu() -> bool:
    """Return whether the CUDA driver finds a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


if not has_gpu():
    sys.path.insert(0, str(Path(__file__).parent / "cuda" / "emulation"))
    # Shared by all processes of this run and the next ones, but separate from the user's CuPy cache.
    os.environ["CUPY_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"horovod_sparse_emulation_{os.getuid()}")

if importlib.util.find_spec("horovod_sparse.kernels._cpu") is None:
    raise ImportError(
        "the tests need the compiled CPU kernels, also on a GPU; with a C++ compiler and pybind11, build them by "
        "HOROVOD_SPARSE_TEST_HOOKS=1 python setup.py build_ext --inplace"
    )

import cupy
import numpy as np
from inputs import BFLOAT16, Array

from horovod_sparse.kernels import to_host

__all__ = ["to_host"]  # for the tests

if TYPE_CHECKING:
    import torch  # not needed by the laws


def emulated() -> bool:
    """Return whether CuPy is emulated."""
    return bool(cupy.__version__ == "emulated")


def on_device(array: Array) -> Any:
    """Return a copy on the device; bfloat16 arrays as their bits."""
    return cupy.asarray(np.ascontiguousarray(array.view(np.uint16) if array.dtype == BFLOAT16 else array))


def segments_on_device(segments: list[tuple[int, Array]]) -> list[tuple[int, Any]]:
    return [(start, on_device(array)) for start, array in segments]


@contextmanager
def waits(count: int) -> Iterator[None]:
    """Assert that the block waits for the device exactly ``count`` times. Only the emulation counts."""
    if not emulated():
        yield
        return
    cupy.transfers.clear()
    yield
    assert sum(cupy.transfers.values()) == count, cupy.transfers


class EmulatedDevice:
    """Device whose tensors are on the CPU; it checks the conditions that a real device relies on.

    Kernels run only inside ``work``, after the gradients were marked.

    Attributes:
        calls: Number of calls of each method.
    """

    horovod_reaches = False

    def __init__(self) -> None:
        self._thread = threading.local()
        self.calls = Counter[str]()

    @property
    def inside(self) -> int:
        """Number of contexts of ``work`` that this thread is in."""
        depth: int = getattr(self._thread, "depth", 0)
        return depth

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Fail if the block copies what CuPy or torch has computed to the host while it is outside of ``work``."""
        from torch.utils._python_dispatch import TorchDispatchMode

        device, get = self, cupy.ndarray.get

        class Guard(TorchDispatchMode):
            def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                assert device.inside or "_local_scalar_dense" not in str(operation), "results are read only inside work"
                return operation(*args, **kwargs or {})

        def guarded(array: Any, *given: Any, **named: Any) -> Any:
            assert device.inside, "results are read only inside work"
            return get(array, *given, **named)

        cupy.ndarray.get = guarded
        try:
            with Guard():
                yield
        finally:
            cupy.ndarray.get = get

    def empty(self, dtype: torch.dtype) -> Any:
        return cupy.empty(0, str(dtype).removeprefix("torch."))

    def array_of(self, tensor: torch.Tensor) -> Any:
        from horovod_sparse.engine.cuda import array_over

        self.calls["array_of"] += 1
        assert self.inside, "arrays are made only inside work"
        return array_over(tensor, 0)

    def nonzero(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        from horovod_sparse.engine.cuda import nonzero

        self.calls["nonzero"] += 1
        assert self.inside, "kernels run only inside work"
        return nonzero(tensors)

    @contextmanager
    def work(self, after: Iterable[Any] = ()) -> Iterator[None]:
        marks = list(after)
        assert all(stream == "caller's" for stream in marks), "work waits only for marks of the backward pass"
        self.calls["work"] += 1
        self.calls["wait"] += len(marks)
        self._thread.depth = self.inside + 1
        try:
            yield
        finally:
            self._thread.depth = self.inside - 1

    def stream(self) -> str:
        self.calls["stream"] += 1
        return "side" if self.inside else "caller's"

    def mark(self, stream: str) -> str:
        self.calls["mark"] += 1
        return stream

    def follow(self) -> None:
        assert not self.inside, "the caller's stream follows, not the side stream itself"
        self.calls["follow"] += 1
