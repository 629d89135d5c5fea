"""Functions that torch.compile leaves as they are."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# As torch.compiler.disable, for hooks that exchange or read gradients and are called inside of compiled functions. It
# imports the compiler with the first call instead of with this package.
eager: Callable[[_Function], _Function] = getattr(torch, "_disable_dynamo")  # noqa: B009 - not public


def weak_hook(method: Callable[..., None], *first: Any) -> Callable[..., None]:
    """Return a hook that calls a method while its object exists: garbage collection does not see what hooks hold."""
    reference = weakref.WeakMethod(method)

    @eager
    def hook(*args: Any) -> None:
        if alive := reference():
            alive(*first, *args)

    return hook


def in_compiled_backward() -> bool:
    """Return whether the backward pass in progress is compiled (``torch._dynamo.config.compiled_autograd``)."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")  # if the compiler was imported
    return bool(getattr(compiled_autograd, "in_compiled_autograd_region", False))
