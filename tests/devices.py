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
from collections.abc import Iterable, Iterator
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
    """

    horovod_reaches = False

    def __init__(self) -> None:
        self.inside = threading.local()
        self.followed: list[tuple[str, bool]] = []  # marks, and whether they were made inside work

    def empty(self, dtype: torch.dtype) -> Any:
        return cupy.empty(0, str(dtype).removeprefix("torch."))

    def array_of(self, tensor: torch.Tensor) -> Any:
        assert getattr(self.inside, "depth", 0), "arrays are made only inside work"
        import torch

        flat = tensor.detach().view(-1)
        return cupy.adopt((flat.view(torch.uint16) if tensor.dtype == torch.bfloat16 else flat).numpy())

    @contextmanager
    def work(self, after: Iterable[Any] = ()) -> Iterator[None]:
        assert all(inside is False for _, inside in after), "work waits only for marks of the backward pass"
        self.inside.depth = getattr(self.inside, "depth", 0) + 1
        yield
        self.inside.depth -= 1

    def mark(self) -> tuple[str, bool]:
        return "mark", bool(getattr(self.inside, "depth", 0))

    def follow(self, mark: tuple[str, bool]) -> None:
        assert not getattr(self.inside, "depth", 0)
        assert mark[1], "results come out of work"
        self.followed.append(mark)
