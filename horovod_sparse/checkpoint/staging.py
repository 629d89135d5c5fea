"""Copies of a training's state, which a thread can write while the training goes on."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


class Staging:
    """Memory on the host for the copies, which every save uses again: new pages take longer than the copying.

    As much as a checkpoint holds stays allocated; what is for tensors of a GPU is pinned.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._used = 0
        self._copies: dict[Any, torch.Tensor] = {}  # of this save, by what was copied: tied parameters stay one
        self._own: set[int] = set()
        self._waits = False

    def begin(self) -> None:
        """Gives up the copies of the save before."""
        self._used, self._waits = 0, False
        self._copies.clear()
        self._own.clear()

    def array(self, array: Any) -> NDArray[Any]:
        """A copy of a NumPy or CuPy array."""
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        host: NDArray[Any] = self._buffer(torch.empty(array.shape, dtype=dtype, device="meta"), False).numpy()
        if isinstance(array, np.ndarray):
            np.copyto(host, array)
        else:
            array.get(out=host)
        return host

    def copy(self, state: Any) -> Any:
        """A copy of nested dicts and lists in which nothing is the training's any more; complete when this returns.

        Arrays that ``array`` has copied since ``begin`` are not copied again.
        """
        copied = self._copy(state)
        if self._waits:
            torch.cuda.synchronize()
        return copied

    def _copy(self, state: Any) -> Any:
        if type(state) in (dict, OrderedDict):
            return type(state)((key, self._copy(one)) for key, one in state.items())
        if type(state) in (list, tuple):
            return type(state)(self._copy(one) for one in state)
        if type(state) in (torch.Tensor, nn.Parameter) and state.layout is torch.strided:
            return self._tensor(state.detach())
        return copy.deepcopy(state)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() in self._own:
            return tensor
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._copies:
            on_gpu = tensor.is_cuda
            self._copies[key] = self._buffer(tensor, pinned=on_gpu).copy_(tensor, non_blocking=on_gpu)
            self._waits |= on_gpu
        return self._copies[key]

    def _buffer(self, like: torch.Tensor, pinned: bool) -> torch.Tensor:
        """The next buffer: that of the save before, where it fits."""
        if self._used == len(self._buffers):
            self._buffers.append(torch.empty(0))
        known = self._buffers[self._used]
        if (known.shape, known.dtype, known.is_pinned()) != (like.shape, like.dtype, pinned):
            known = torch.empty_like(like, device="cpu", pin_memory=pinned)
            self._buffers[self._used] = known
        self._used += 1
        if known.numel():
            self._own.add(known.data_ptr())
        return known
