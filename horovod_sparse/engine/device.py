"""Devices that tensors are on: arrays made of these, and the order in which work on them is done there."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import torch

from horovod_sparse.kernels.types import Array

# A point in the work of a device that was begun so far.
Mark: TypeAlias = Any


class Device(Protocol):
    """A device that kernels run on, and its order of work.

    Attributes:
        horovod_reaches: Whether every Horovod, however it was built, exchanges tensors that are there.
    """

    horovod_reaches: bool

    def empty(self, dtype: torch.dtype) -> Array:
        """An array without elements, float32 or float64, which names the device to whatever is like it."""
        ...

    def array_of(self, tensor: torch.Tensor) -> Array:
        """A flat array of a contiguous tensor, sharing its memory.

        Args:
            tensor: float32, float64, float16 or bfloat16.
        """
        ...

    def work(self, after: Iterable[Mark] = ()) -> AbstractContextManager[None]:
        """Inside, kernels and copies are beside the caller's own work, and come after these marks."""
        ...

    def mark(self) -> Mark:
        """The point that the work has reached which this thread has begun, inside ``work`` or outside."""
        ...

    def follow(self, mark: Mark) -> None:
        """Lets what this thread begins from now on come after a mark; does not wait for it."""
        ...


class Host:
    """The CPU, on which everything is done when a function returns."""

    horovod_reaches = True

    def empty(self, dtype: torch.dtype) -> Array:
        """An array without elements."""
        return self.array_of(torch.empty(0, dtype=dtype))

    def array_of(self, tensor: torch.Tensor) -> Array:
        """A flat NumPy view; bfloat16 as that of ml_dtypes."""
        if tensor.dtype == torch.bfloat16:  # unknown to NumPy itself
            return tensor.view(torch.uint16).numpy().reshape(-1).view(ml_dtypes.bfloat16)
        array: Array = tensor.numpy().reshape(-1)  # torch's own views take ten times as long
        return array

    def work(self, after: Iterable[Mark] = ()) -> AbstractContextManager[None]:
        """Nothing has to be arranged."""
        del after
        return nullcontext()

    def mark(self) -> Mark:
        """Everything is done."""
        return None

    def follow(self, mark: Mark) -> None:
        """Nothing has to be waited for."""


@functools.cache
def device_of(device: torch.device) -> Device:
    """The device that torch calls so; the same object every time.

    Raises:
        ImportError: It needs CuPy, which is not installed.
        ValueError: There are no kernels for such a device.
    """
    if device.type == "cpu":
        return Host()
    if device.type == "cuda":
        try:
            cuda = importlib.import_module("horovod_sparse.engine.cuda")
        except ImportError as error:
            major = (torch.version.cuda or "12").partition(".")[0]
            raise ImportError(
                f"parameters on {device} need CuPy, which could not be imported ({error}): "
                f"pip install 'horovod_sparse[cuda{major}]'"
            ) from error
        made: Device = cuda.CudaDevice(device)
        return made
    raise ValueError(f"parameters are on {device}, but gradients can be compressed on the CPU and on CUDA devices only")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that gradients are added up and sent in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32
