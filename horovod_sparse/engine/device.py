"""Devices of tensors: arrays that share their memory, and the order of the work on them."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import ml_dtypes
import torch

from horovod_sparse.kernels.types import Array

# A point in the work that has been submitted to a device; an event on a GPU.
Mark: TypeAlias = Any
_HEAD = 64  # elements of a tensor that are inspected before all of them are


class Device:
    """A device on which kernels run, with its order of work: the CPU, where work is complete when a function returns.

    Attributes:
        horovod_reaches: Whether Horovod exchanges tensors on this device even if it was built without CUDA.
    """

    horovod_reaches = True

    def empty(self, dtype: torch.dtype) -> Array:
        """Return an empty array in float32 or float64, which determines device and dtype of arrays created like it."""
        return self.array_of(torch.empty(0, dtype=dtype, device="cpu"))

    def array_of(self, tensor: torch.Tensor) -> Array:
        """Return a flat array that shares the memory of a contiguous tensor, and keeps the tensor alive.

        Args:
            tensor: A tensor in float32, float64, float16 or bfloat16, which ml_dtypes has for NumPy.
        """
        if tensor.dtype == torch.bfloat16:  # not a dtype of NumPy
            return tensor.view(torch.uint16).numpy().reshape(-1).view(ml_dtypes.bfloat16)
        array: Array = tensor.numpy().reshape(-1)  # torch's own views take ten times as long
        return array

    def nonzero(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Return for each contiguous tensor whether an element is not zero; waits for a GPU at most once."""
        heads = torch.stack([tensor.view(-1)[:_HEAD].any() for tensor in tensors]).tolist()
        return [head or bool(tensor.any()) for head, tensor in zip(heads, tensors, strict=True)]

    def work(self, after: Iterable[Mark] = ()) -> AbstractContextManager[None]:
        """Return a context in which kernels and copies run concurrently with the caller's work, after the marks."""
        del after
        return nullcontext()

    def stream(self) -> Hashable:
        """Return the stream to which this thread submits work, inside or outside of ``work``; None: there is one."""
        return None

    def mark(self, stream: Any) -> Mark:
        """Return a mark after all work that has been submitted to a stream, by any thread."""
        del stream

    def follow(self) -> None:
        """Order the work that this thread submits from now on after all that was submitted inside of ``work``."""


_devices: dict[torch.device, Device] = {}
_creating = threading.Lock()  # two streams for a device would not be ordered


def device_of(device: torch.device) -> Device:
    """Return the device for a torch device; always the same object, on all threads.

    Raises:
        ImportError: The device needs CuPy, which cannot be imported.
        ValueError: There are no kernels for this kind of device.
    """
    with _creating:
        if device not in _devices:
            _devices[device] = _new(device)
        return _devices[device]


def _new(device: torch.device) -> Device:
    if device.type == "cpu":
        return Device()
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
    raise ValueError(f"parameters are on {device}, but gradients can only be compressed on the CPU and on CUDA devices")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are accumulated and sent: float64 for 64-bit reals, else float32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as real and imaginary parts that share its memory; a real tensor unchanged."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)  # a mean of conjugates is their conjugate
