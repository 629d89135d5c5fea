"""Wrapped optimizers: of a class that is built at run time, with everything that the optimizer they wrap has."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from horovod_sparse.frontends.optimizers import replaces_step

_AMP = "_step_supports_amp_scaling"  # of torch's fused optimizers, which GradScaler reads
# Attributes of a class that belong to itself. Horovod's broadcast_optimizer_state recognizes optimizers by __module__.
_OWN = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"}
_OF_TORCH = {*dir(torch.optim.Optimizer), _AMP}


class _Kept:
    """Base class between a wrapped optimizer and the user's class, whose constructor would reset what the user set."""

    def __init__(self, params: Any) -> None:
        """Do nothing: ``wrapped`` has taken all attributes over."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Raise TypeError: a copy would exchange the same parameters again."""
        raise TypeError(
            "a wrapped optimizer cannot be copied, as it exchanges with the other ranks: copy optimizer.state_dict(), "
            "or copy the plain optimizer before it is wrapped"
        )


def functions_of(*classes: type) -> dict[str, Any]:
    """Return the attributes that classes define, for a class that is built at run time; later classes override."""
    return {name: value for part in classes for name, value in vars(part).items() if name not in _OWN}


def wrapped(optimizer: torch.optim.Optimizer, base: type, functions: Mapping[str, Any]) -> Any:
    """Return an optimizer of a subclass with the attributes of another one, on which no constructor was called yet.

    Param groups, states and hooks are shared, but not the lists and dictionaries that hold them: what is added to one
    optimizer is not added to the other. Methods of the instance are bound to the new one. Attributes that have the
    names of functions are left out: the ``step`` of a scheduler would count the steps of the plain optimizer.

    Args:
        optimizer: The optimizer.
        base: Class with functions for the user, whose names are not those of the optimizer's functions.
        functions: Functions and attributes that override those of its class.
    """
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (_Kept, base, kind), dict(functions)))
    for name, value in vars(optimizer).items():
        if _is_copied(name):
            value = copy.copy(value)
        elif isinstance(value, types.MethodType) and value.__self__ is optimizer:
            value = types.MethodType(value.__func__, made)
        if name not in functions and not hasattr(base, name):
            made.__dict__[name] = value
    return made


def warn_of_hidden(optimizer: torch.optim.Optimizer, made: torch.optim.Optimizer) -> None:
    """Warn the caller's caller of attributes of an optimizer that the one that wraps it has replaced by its own."""
    kind = type(optimizer)
    mine = type(made).__mro__[: type(made).__mro__.index(kind)]
    hidden = {name for part in mine for name in vars(part).keys() - _OF_TORCH if hasattr(kind, name)}
    for name, value in vars(optimizer).items():
        if not _is_copied(name) and name != _AMP and _function(vars(made).get(name)) is not _function(value):
            hidden.add(name)
    if not replaces_step(optimizer):
        hidden.discard("step")
    if hidden:
        warnings.warn(
            f"the wrapped optimizer has its own {', '.join(sorted(hidden))}, hiding what {kind.__name__} has under "
            f"that name, also in its own code: rename it, or set it on the wrapped optimizer",
            stacklevel=3,
        )


def _is_copied(name: str) -> bool:
    return name in ("state", "param_groups") or name.startswith("_optimizer_")


def _function(value: Any) -> Any:
    """Return the function of a bound method, and any other value itself."""
    return getattr(value, "__func__", value)
