"""A GPU that torch and CuPy share: one stream beside torch's own, and torch's memory for both."""

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
    """Runs the kernels on a stream of its own, so that selection and exchange go on beside the backward pass.

    CuPy's arrays come out of torch's allocator while ``work`` lasts: two pools would keep twice as much.

    Args:
        device: The device, as torch names it.
    """

    horovod_reaches = False  # built without CUDA it reads copies that may not be there yet

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # "cuda" alone is the current one
        # Of higher priority: what a bucket needs is little, and the network waits for it.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._cupy_stream = _same_stream(self._stream, self._device.index)
        self._allocator = cupy.cuda.PythonFunctionAllocator(_allocate, _free)

    def empty(self, dtype: torch.dtype) -> Array:
        """An array without elements; inside ``work``."""
        array: Array = cupy.empty(0, _NUMPY[dtype])
        return array

    def array_of(self, tensor: torch.Tensor) -> Array:
        """A flat CuPy array of the tensor's memory; bfloat16, which CuPy does not have, as its bits in uint16."""
        flat = tensor.detach().view(-1)
        flat.record_stream(self._stream)  # torch must not give the memory away before this stream is done with it
        if tensor.dtype == torch.bfloat16:
            array: Array = cupy.from_dlpack(flat.view(torch.int16)).view(np.uint16)
        else:
            array = cupy.from_dlpack(flat)
        return array

    @contextmanager
    def work(self, after: Iterable[Any] = ()) -> Iterator[None]:
        """Makes this device's stream the current one of torch and CuPy, and torch's allocator CuPy's."""
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
        """An event on the current stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        """The current stream waits for the event; the host does not."""
        torch.cuda.current_stream(self._device).wait_event(mark)


def _same_stream(stream: torch.cuda.Stream, device: int) -> Any:
    """A stream of torch's, for CuPy."""
    if hasattr(cupy.cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, device)  # CuPy 13, or an older torch


def _allocate(nbytes: int, device: int) -> int:
    """Memory for the stream that is current: torch gives it to no other one before this one has come so far."""
    pointer: int = torch.cuda.caching_allocator_alloc(nbytes, device, cupy.cuda.get_current_stream().ptr)
    return pointer


def _free(pointer: int, device: int) -> None:
    del device  # the allocator knows
    torch.cuda.caching_allocator_delete(pointer)  # type: ignore[no-untyped-call]
