"""State outside the exchange: random generators, model buffers, and values that users add."""

from __future__ import annotations

import io
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (bool, float, complex, str, type(None), torch.Size, torch.dtype, torch.device)
_LONGEST = 255  # bytes of the longest integer that torch.load reads with weights_only
_DEEPEST = 100  # levels of nested containers; Python's pickle recurses several times for each


def generators(model: nn.Module) -> dict[str, Any]:
    """Return the states of this rank's global generators: Python, NumPy, torch, and torch on the model's GPU."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - scripts use it
    assert isinstance(numpy, dict)
    key = numpy["state"]["key"].astype(np.int64)  # torch supports uint32 only since 2.3
    return {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": torch.from_numpy(key)}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(_gpu_of(model)) if torch.cuda.is_available() else None,
    }


def set_generators(state: dict[str, Any], model: nn.Module) -> None:
    """Restore the states returned by ``generators``."""
    random.setstate(state["python"])
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"], _gpu_of(model))


def _gpu_of(model: nn.Module) -> torch.device | str:
    """Return the GPU of a model's first parameter on one; "cuda", the current one, if there is none."""
    return next((p.device for p in model.parameters() if p.is_cuda), "cuda")


def buffers(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a model's state that differs between ranks, such as batch normalization statistics."""
    names = {name for name, b in model.named_buffers(remove_duplicate=False) if not hasattr(b, "to_local")}
    return {name: value for name, value in state.items() if name in names}


def require_loadable(value: Any, name: str, depth: int = _DEEPEST) -> None:
    """Raise ValueError if a part of the value cannot be saved and loaded again without executing code.

    The message names that part, starting with ``name``. ``depth`` is the number of levels of nesting allowed.
    """
    if type(value) is int:
        if not _is_short(value):
            raise ValueError(
                f"{name} is an integer of {value.bit_length()} bits, but torch loads at most {8 * _LONGEST - 1}: save "
                "it as a string, hex(value), and read it back with int(text, 16)"
            )
    elif type(value) in _PLAIN or (type(value) in (torch.Tensor, nn.Parameter) and not vars(value)):
        return
    elif type(value) in (dict, OrderedDict, list, tuple):
        if not depth:
            raise ValueError(f"{name:.200} is nested more than {_DEEPEST} levels deep, or contains itself: flatten it")
        for part, suffix in _parts(value):
            require_loadable(part, f"{name}{suffix}", depth - 1)
    elif hasattr(value, "to_local"):
        raise ValueError(
            f"{name} is a DTensor, of which each rank holds a shard: save {name}.to_local(), or pass the object that "
            "it belongs to as an argument of its own"
        )
    else:
        _require_round_trip(value, name)


def _parts(value: Any) -> Iterator[tuple[Any, str]]:
    """Yield keys, items and attributes of a container, each with the suffix that locates it in a message."""
    if isinstance(value, dict):
        yield from ((key, f" (key {_shown(key)})") for key in value)
        yield from ((item, f"[{_shown(key)}]") for key, item in value.items())
    else:
        yield from ((item, f"[{index}]") for index, item in enumerate(value))
    if type(value) is OrderedDict:  # torch stores the metadata of a model's state in an attribute
        yield from ((item, f".{attribute}") for attribute, item in vars(value).items())


def _shown(key: Any) -> str:
    """Return the text of a key for a message; Python refuses to print very long integers."""
    return f"<integer of {key.bit_length()} bits>" if isinstance(key, int) and not _is_short(key) else repr(key)


def _is_short(value: int) -> bool:
    return value.bit_length() < 8 * _LONGEST  # one bit is the sign


def _require_round_trip(value: Any, name: str) -> None:
    try:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{name} is of type {type(value).__module__}.{type(value).__qualname__}, which cannot be loaded again "
            "without executing code: save numbers, strings, tensors, and lists or dicts of them; value.item() turns a "
            "NumPy scalar into a number, torch.from_numpy(array) an array into a tensor"
        ) from error
