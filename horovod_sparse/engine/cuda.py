"""GPU shared by torch and CuPy: a side stream, and torch's allocator for both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
import torch

from horovod_sparse.engine.device import Device
from horovod_sparse.kernels.types import Array

_NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,  # its bits
    torch.int32: np.int32,  # of indices
}


class CudaDevice(Device):
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

    def empty(self, dtype: torch.dtype) -> Array:
        """Return an empty array; call it inside ``work``."""
        array: Array = cupy.empty(0, _NUMPY[dtype])
        return array

    def array_of(self, tensor: torch.Tensor) -> Array:
        """Return a flat CuPy array of the tensor's memory; bfloat16, which CuPy lacks, as uint16 bits.

        Needs no ``record_stream``, which would delay the reuse of every gradient's memory: the worker keeps gradients
        until torch's stream follows this one.
        """
        return array_over(tensor, self._device.index)

    def nonzero(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Return for each tensor whether an element is not zero."""
        return nonzero(tensors)

    @contextmanager
    def work(self, after: Iterable[Any] = ()) -> Iterator[None]:
        """Make the private stream the current one of torch and CuPy, and torch's allocator that of CuPy."""
        with (
            # At its end, CuPy's context selects the device before, which creates a CUDA context on GPU 0 in a thread
            # that has selected none. Inside torch's, the device before is this one, and torch's creates none.
            torch.cuda.device(self._device),
            cupy.cuda.Device(self._device.index),
            torch.cuda.stream(self._stream),
            self._cupy_stream,
            cupy.cuda.using_allocator(self._allocate),
        ):
            for mark in after:
                self._stream.wait_event(mark)
            yield

    def _allocate(self, nbytes: int) -> Any:
        """Allocate memory for the current stream; torch lets other streams use it only after this stream's work."""
        # torch.empty takes longer, and fills the memory if deterministic algorithms are enabled.
        storage = torch.UntypedStorage(nbytes, device=self._device)  # type: ignore[no-untyped-call]
        return pointer_to(storage, nbytes, self._device.index)

    def stream(self) -> torch.cuda.Stream:
        """Return torch's current stream."""
        return torch.cuda.current_stream(self._device)

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record an event on a stream."""
        event: torch.cuda.Event = stream.record_event()
        return event

    def follow(self) -> None:
        """Make the current stream wait for the private one; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def array_over(tensor: torch.Tensor, device: int) -> Array:
    """Return a flat CuPy array of a contiguous tensor's memory on a device, without DLPack's exchange of streams."""
    array: Array = cupy.ndarray((tensor.numel(),), _NUMPY[tensor.dtype], pointer_to(tensor, tensor.nbytes, device))
    return array


def nonzero(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether an element is not zero, from multi-tensor kernels and one copy to the host."""
    # The largest magnitude: squares of small values would be zero. NaN is kept, and is not zero.
    largest = torch._foreach_norm(list(tensors), torch.inf)
    return [value != 0 for value in torch.stack(largest).tolist()]


def pointer_to(owner: torch.Tensor | torch.UntypedStorage, nbytes: int, device: int) -> Any:
    """Return CuPy's pointer to memory of torch, which keeps its owner alive.

    CuPy's ``PythonFunctionAllocator`` would lose memory that is part of a reference cycle: the garbage collector may
    clear its function that frees the memory before it is called.
    """
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(owner.data_ptr(), nbytes, owner, device), 0)


def _same_stream(stream: torch.cuda.Stream, device: int) -> Any:
    """Return a torch stream as a CuPy stream."""
    if hasattr(cupy.cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, device)  # CuPy 13, or an older torch
