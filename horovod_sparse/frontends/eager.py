"""Functions that torch.compile leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# As torch.compiler.disable, for hooks that exchange or read gradients and are called inside of compiled functions. It
# imports the compiler with the first call instead of with this package.
eager: Callable[[_Function], _Function] = getattr(torch, "_disable_dynamo")  # noqa: B009 - not public
