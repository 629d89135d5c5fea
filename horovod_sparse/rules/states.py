"""Validation of states before they are loaded: structure, finite numbers, and ranges."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.kernels import largest_magnitude
from horovod_sparse.kernels.types import Array

_MAY_BE_INFINITE = "schedule"  # the norms of a schedule are NaN until they are known


def require_like(state: Any, own: Any, name: str = "state") -> None:
    """Raise ValueError with the first difference in structure of two states: keys, lists, and dtype and ndim of arrays.

    Lengths and numbers are checked by the rule that loads them; only the rule knows which are valid.
    """
    if isinstance(own, Mapping):
        if not isinstance(state, Mapping) or state.keys() != own.keys():
            found = sorted(map(str, state)) if isinstance(state, Mapping) else repr(state)[:100]
            raise ValueError(f"{name} must be a dict with the keys {sorted(own)}, not {found}")
        for key, value in own.items():
            require_like(state[key], value, f"{name}[{key!r}]")
    elif hasattr(own, "dtype"):
        if not hasattr(state, "ndim") or (state.ndim, state.dtype) != (own.ndim, own.dtype):
            found = f"{state.ndim} and {state.dtype}" if hasattr(state, "ndim") else repr(state)[:100]
            raise ValueError(f"{name} must be an array with ndim and dtype {own.ndim} and {own.dtype}, not {found}")
    elif isinstance(own, (list, tuple)) and not isinstance(state, (list, tuple)):
        raise ValueError(f"{name} must be a list, not {state!r:.100}")


def require_finite(state: Any, name: str) -> None:
    """Raise ValueError with the key of a residual, unit or threshold that is not finite: it would stay so for good."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key != _MAY_BE_INFINITE:
                require_finite(value, f"{name}[{key!r}]")
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            require_finite(value, f"{name}[{index}]")
    elif hasattr(state, "dtype") and hasattr(state, "min"):
        if 0 not in state.shape and _is_floating(state) and not math.isfinite(largest_magnitude(state)):
            raise ValueError(f"{name} holds values that are not finite: resume from an earlier checkpoint")
    elif isinstance(state, numbers.Real) and not math.isfinite(state):
        raise ValueError(f"{name} is {state}, which is not finite: resume from an earlier checkpoint")


def _is_floating(array: Any) -> bool:
    """Return whether an array or torch tensor holds floating-point numbers."""
    return bool(array.dtype.kind == "f" if hasattr(array.dtype, "kind") else array.is_floating_point())


def checked_integer(value: Any, name: str, least: int = 0) -> int:
    """Return the value as an int; raise ValueError unless it is an integer of at least ``least``."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r:.100}")
    return int(value)


def checked_number(value: Any, name: str, least: float = 0.0, *, finite: bool = False) -> float:
    """Return the value as a float; raise ValueError unless it is a number of at least ``least``.

    NaN and infinity are accepted unless ``finite`` is set, because a rule reloads its own numbers when a step is
    undone; ``require_finite`` rejects them in checkpoints.
    """
    known = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not known or value < least or (finite and not math.isfinite(value)):
        raise ValueError(f"{name} must be a {'finite ' * finite}number of at least {least:g}, not {value!r:.100}")
    return float(value)


def checked_numbers(values: Any, name: str, count: int | None = None, *, finite: bool = False) -> list[float]:
    """Return the values as floats of at least 0; raise ValueError unless there are ``count`` (None: any number)."""
    if not isinstance(values, Sequence) or count not in (None, len(values)):
        raise ValueError(f"{name} must be a list of {'' if count is None else f'{count} '}numbers, not {values!r:.100}")
    return [checked_number(value, f"{name}[{index}]", finite=finite) for index, value in enumerate(values)]


def checked_flag(value: Any, name: str) -> bool:
    """Return the value as a bool; raise ValueError unless it is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, not {value!r:.100}")
    return bool(value)


def require_positions(positions: Array, size: int, name: str) -> None:
    """Raise ValueError unless positions [k] are ascending and within 0 .. size - 1; kernels do not check them."""
    inside = not len(positions) or (positions[0] >= 0 and positions[-1] < size)
    if not inside or not bool((positions[1:] > positions[:-1]).all()):
        raise ValueError(f"{name} must be ascending positions from 0 to {size - 1}, but are not")
