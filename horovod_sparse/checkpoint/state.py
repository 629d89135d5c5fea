"""Parts of a checkpoint besides the exchange's own state: generators, buffers, and what users add."""

from __future__ import annotations

import io
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


def generators() -> dict[str, Any]:
    """The states of the global generators on this rank: Python's, NumPy's, torch's, and torch's on its CUDA device."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - scripts use it
    assert isinstance(numpy, dict)
    key = numpy["state"]["key"].astype(np.int64)  # torch has had uint32 since 2.3 only
    return {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": torch.from_numpy(key)}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_generators(state: dict[str, Any]) -> None:
    """Takes over states given by ``generators``."""
    random.setstate(state["python"])
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def buffers(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The part of a model's state that differs between ranks, such as batch normalization's statistics."""
    names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in state.items() if name in names}


def require_loadable(value: Any, name: str) -> None:
    """Refuses what could not be loaded again without executing code.

    Args:
        value: Nested dicts and lists of numbers, strings and tensors.
        name: What to call it in the message.

    Raises:
        ValueError: Something in it is of another type; names it.
    """
    if type(value) in _PLAIN or type(value) in (torch.Tensor, nn.Parameter):
        return
    if type(value) in (dict, OrderedDict):
        for key, one in value.items():
            require_loadable(key, f"the key {key!r} of {name}")
            require_loadable(one, f"{name}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, one in enumerate(value):
            require_loadable(one, f"{name}[{index}]")
    else:
        _require_round_trip(value, name)


def _require_round_trip(value: Any, name: str) -> None:
    try:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{name} is of type {type(value).__module__}.{type(value).__qualname__}, which cannot be loaded again "
            "without executing code: give numbers, strings, tensors, and lists or dicts of them"
        ) from error
