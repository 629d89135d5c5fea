"""Copies of the training state, which a thread writes while training continues."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


class Staging:
    """Host buffers for the copies, reused by every save: new pages would take longer than the copy itself.

    The buffers are as large as a checkpoint and stay allocated. Those for GPU tensors are pinned.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._used = 0
        self._copies: dict[Any, torch.Tensor] = {}  # of this save, by source: tied parameters stay tied
        self._own: set[int] = set()
        self._gpus: set[torch.device] = set()  # from which copies are under way

    def begin(self) -> None:
        """Release the copies of the previous save."""
        self._used = 0
        self._gpus.clear()
        self._copies.clear()
        self._own.clear()

    def array(self, array: Any) -> NDArray[Any]:
        """Return a host copy of a NumPy or CuPy array."""
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        host: NDArray[Any] = self._buffer(torch.empty(array.shape, dtype=dtype, device="meta"), False).numpy()
        if isinstance(array, np.ndarray):
            np.copyto(host, array)
        else:
            array.get(out=host)
        return host

    def copy(self, state: Any) -> Any:
        """Return a complete copy of nested dicts and lists that shares no memory with the training.

        Arrays that ``array`` has copied since ``begin`` are not copied again.
        """
        copied = self._copy(state)
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
        return copied

    def _copy(self, state: Any) -> Any:
        if type(state) in (dict, OrderedDict):
            copied = type(state)((key, self._copy(value)) for key, value in state.items())
            if vars_of := getattr(state, "__dict__", None):  # a module's versions
                vars(copied).update(copy.deepcopy(vars_of))
            return copied
        if type(state) in (list, tuple):
            return type(state)(self._copy(item) for item in state)
        if type(state) in (torch.Tensor, nn.Parameter) and state.layout is torch.strided and not state.is_meta:
            return self._tensor(state.detach())
        return copy.deepcopy(state)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() in self._own:
            return tensor
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._copies:
            on_gpu = tensor.is_cuda
            self._copies[key] = self._buffer(tensor, pinned=on_gpu).copy_(tensor, non_blocking=on_gpu)
            if on_gpu:
                self._gpus.add(tensor.device)
        return self._copies[key]

    def _buffer(self, like: torch.Tensor, pinned: bool) -> torch.Tensor:
        """Return the next buffer: that of the previous save if it fits, otherwise a new one."""
        if self._used == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.float32, device="cpu"))
        buffer = self._buffers[self._used]
        if (buffer.shape, buffer.dtype, buffer.is_pinned()) != (like.shape, like.dtype, pinned):
            buffer = torch.empty_like(like, device="cpu", pin_memory=pinned)
            self._buffers[self._used] = buffer
        self._used += 1
        if buffer.numel():
            self._own.add(buffer.data_ptr())
        return buffer
