"""Wrapped optimizers: instances of a class built at run time that keep all of the optimizer they are made from."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from horovod_sparse.frontends.optimizers import replaces_step


class _Kept:
    """Base class between a wrapped optimizer and the user's class, whose constructor would reset what the user set."""

    def __init__(self, params: Any) -> None:
        """Do nothing: ``wrapped`` has taken all attributes over."""


def require_free_names(optimizer: torch.optim.Optimizer, functions: Mapping[str, Any]) -> None:
    """Check that functions of a front end hide none of the user's.

    Args:
        optimizer: The optimizer to wrap.
        functions: Functions and attributes of the class that wraps it.

    Raises:
        ValueError: An attribute of the optimizer has the name of one of the functions, other than torch's own.
    """
    kind, of_torch = type(optimizer), {*dir(torch.optim.Optimizer), "_step_supports_amp_scaling"}
    for name in functions.keys() - of_torch:
        if name.startswith("__"):
            continue
        if name in vars(optimizer) or getattr(kind, name, None) is not None:
            raise ValueError(
                f"{kind.__name__}.{name} would be hidden by what a wrapped optimizer has under that name: rename it in "
                f"{kind.__name__}"
            )


def require_kept(optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> None:
    """Raise ValueError if the constructor of a wrapped optimizer has overwritten attributes that it was given."""
    for name, value in kept.items():
        if vars(optimizer)[name] is not value:
            kind = type(optimizer).__name__
            raise ValueError(f"{kind}.{name} would be overwritten by Horovod's attribute: rename it in {kind}")


def wrapped(optimizer: torch.optim.Optimizer, functions: Mapping[str, Any]) -> Any:
    """Return an optimizer of a subclass with the attributes of another one, on which no constructor was called yet.

    Param groups, states and hooks are shared, but not the lists and dictionaries that hold them: what is added to one
    optimizer is not added to the other. Methods of the instance are bound to the new one. A ``step`` of the instance is
    left out: that of a scheduler would count the steps of the plain optimizer.

    Args:
        optimizer: The optimizer.
        functions: Functions and attributes that override those of its class.
    """
    kind = type(optimizer)
    if replaces_step(optimizer):
        warnings.warn(
            f"step() of this {kind.__name__} was replaced on the instance, and the wrapped optimizer takes the steps "
            "of its class: wrap the optimizer first, and replace step() of the result",
            stacklevel=3,
        )
    made: Any = object.__new__(type(kind.__name__, (_Kept, kind), dict(functions)))
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups") or name.startswith("_optimizer_"):
            value = copy.copy(value)
        elif isinstance(value, types.MethodType) and value.__self__ is optimizer:
            value = types.MethodType(value.__func__, made)
        if name != "step":
            made.__dict__[name] = value
    return made
