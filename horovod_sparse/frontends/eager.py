"""Functions that torch.compile leaves as they are."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

_Function = TypeVar("_Function", bound=Callable[..., Any])

# As torch.compiler.disable, for hooks that exchange or read gradients and are called inside of compiled functions. It
# imports the compiler with the first call instead of with this package.
eager: Callable[[_Function], _Function] = getattr(torch, "_disable_dynamo")  # noqa: B009 - not public


def weak_hook(method: Any, *first: Any) -> Callable[..., None]:
    """Return a hook that calls a bound method while its object exists.

    Garbage collection does not see what hooks hold.
    """
    reference, function = weakref.ref(method.__self__), method.__func__  # faster than a WeakMethod
    uncompiled = eager(function)

    def hook(*args: Any) -> None:
        owner = reference()
        if owner is not None:
            (uncompiled if get_eval_frame_callback() else function)(owner, *first, *args)

    # Hooks are called for every gradient, and ``eager`` adds 2 us to each call, even if nothing is compiled.
    decorators = sys.modules.get("torch._dynamo.decorators")  # imported by torch's optimizers
    return eager(hook) if decorators is None else decorators.skip(hook)


def in_compiled_backward() -> bool:
    """Return whether the backward pass in progress is compiled (``torch._dynamo.config.compiled_autograd``)."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")  # if the compiler was imported
    return bool(getattr(compiled_autograd, "in_compiled_autograd_region", False))
