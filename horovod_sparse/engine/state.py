"""States of an exchange as tensors, which files hold, and as arrays, which the pipelines hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from horovod_sparse.kernels import copy_to_host
from horovod_sparse.rules.states import require_finite

__all__ = ["leader", "on_host", "require_finite", "to_arrays", "to_tensors"]


def to_tensors(state: Any, copy: Callable[[Any], NDArray[Any]] = copy_to_host) -> Any:
    """A copy of nested dictionaries in which arrays, copied to the host by ``copy``, have become tensors."""
    return _convert(state, lambda array: torch.from_numpy(copy(array)))


def to_arrays(state: Any) -> Any:
    """Nested dictionaries in which tensors have become NumPy arrays, that share their memory where they can."""
    return _convert(state, lambda tensor: tensor.cpu().numpy())


def on_host(state: Any) -> Any:
    """A copy of nested dictionaries of tensors, on the host."""
    return _convert(state, lambda tensor: tensor.detach().to("cpu", copy=True))


def leader(state: dict[str, Any] | None) -> dict[str, Any]:
    """A rank's state without what is large, its memories and parameters; no buckets where Horovod exchanged."""
    buckets = [] if state is None else state["buckets"]
    kept = {} if state is None else {key: state[key] for key in ("local_step",) if key in state}
    return {**kept, "buckets": [{**bucket, "memory": {}} for bucket in buckets]}


def _convert(state: Any, conversion: Callable[[Any], Any]) -> Any:
    if isinstance(state, dict):
        return {key: _convert(value, conversion) for key, value in state.items()}
    return conversion(state) if hasattr(state, "dtype") else state
