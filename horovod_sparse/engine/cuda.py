"""GPU shared by torch and CuPy: a side stream, and torch's allocator for both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
import torch

from horovod_sparse.kernels.types import Array

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


class CudaDevice:
    """Device that runs kernels on a private stream, so that selection and exchange overlap the backward pass.

    Inside ``work``, CuPy allocates from torch's allocator: two memory pools would hold twice as much.

    Args:
        device: The torch device.
    """

    horovod_reaches = False  # built without CUDA, Horovod may read host copies before they are complete

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # adds the index: "cuda" is the current device
        # High priority: a bucket needs little work, and the network waits for it.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._cupy_stream = _same_stream(self._stream, self._device.index)
        self._allocator = cupy.cuda.PythonFunctionAllocator(_allocate, _free)

    def empty(self, dtype: torch.dtype) -> Array:
        """Return an empty array; call it inside ``work``."""
        array: Array = cupy.empty(0, _NUMPY[dtype])
        return array

    def array_of(self, tensor: torch.Tensor) -> Array:
        """Return a flat CuPy array of the tensor's memory; bfloat16, which CuPy lacks, as uint16 bits."""
        flat = tensor.detach().view(-1)
        flat.record_stream(self._stream)  # torch must not reuse the memory before this stream has finished with it
        if tensor.dtype == torch.bfloat16:
            array: Array = cupy.from_dlpack(flat.view(torch.int16)).view(np.uint16)
        else:
            array = cupy.from_dlpack(flat)
        return array

    @contextmanager
    def work(self, after: Iterable[Any] = ()) -> Iterator[None]:
        """Make the private stream the current one of torch and CuPy, and torch's allocator that of CuPy."""
        with (
            cupy.cuda.Device(self._device.index),
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
            self._cupy_stream,
            cupy.cuda.using_allocator(self._allocator.malloc),
        ):
            for mark in after:
                self._stream.wait_event(mark)
            yield

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        """Make the current stream wait for the event; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(mark)


def _same_stream(stream: torch.cuda.Stream, device: int) -> Any:
    """Return a torch stream as a CuPy stream."""
    if hasattr(cupy.cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, device)  # CuPy 13, or an older torch


def _allocate(nbytes: int, device: int) -> int:
    """Allocate memory for the current stream; torch lets other streams use it only after this stream's work."""
    pointer: int = torch.cuda.caching_allocator_alloc(nbytes, device, cupy.cuda.get_current_stream().ptr)
    return pointer


def _free(pointer: int, device: int) -> None:
    del device  # known to the allocator
    torch.cuda.caching_allocator_delete(pointer)  # type: ignore[no-untyped-call]
