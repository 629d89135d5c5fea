"""Conversion of exchange states between tensors (in files) and arrays (in pipelines)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from horovod_sparse.kernels import copy_to_host
from horovod_sparse.rules.states import require_finite

__all__ = ["leader", "on_host", "require_finite", "to_arrays", "to_tensors"]


def to_tensors(state: Any, copy: Callable[[Any], NDArray[Any]] = copy_to_host) -> Any:
    """Return a copy of nested dictionaries with arrays, copied to the host by ``copy``, converted to tensors."""
    return _convert(state, lambda array: torch.from_numpy(copy(array)))


def to_arrays(state: Any) -> Any:
    """Return nested dictionaries with tensors converted to NumPy arrays, which share memory if possible."""
    return _convert(state, lambda tensor: tensor.cpu().numpy())


def on_host(state: Any) -> Any:
    """Return a copy on the host of nested dictionaries of tensors."""
    return _convert(state, lambda tensor: tensor.detach().to("cpu", copy=True))


def leader(state: dict[str, Any] | None) -> dict[str, Any]:
    """Return a rank's state without its large parts, memories and parameters; without buckets if Horovod exchanged."""
    buckets = [] if state is None else state["buckets"]
    kept = {key: value for key, value in (state or {}).items() if key in ("local_step", "replicas")}
    return {**kept, "buckets": [{**bucket, "memory": {}} for bucket in buckets]}


def _convert(state: Any, conversion: Callable[[Any], Any]) -> Any:
    if isinstance(state, dict):
        return {key: _convert(value, conversion) for key, value in state.items()}
    return conversion(state) if hasattr(state, "dtype") else state
