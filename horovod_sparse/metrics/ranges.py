"""Spans as ranges of torch's profiler or NVTX while either is on. Torch is not imported here, only used if loaded."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

PREFIX = "hvs."
# Nsight's tools, such as `nsys profile`, set this variable to receive a program's ranges.
_NVTX = "NVTX_INJECTION64_PATH" in os.environ


class Both:
    """Two nested context managers in one.

    Args:
        outer: Context manager entered first and left last.
        inner: Context manager entered last and left first.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, traceback)
        self._outer.__exit__(kind, error, traceback)


def active() -> bool:
    """Return whether torch's profiler is on, or a tool records NVTX ranges."""
    profiler = sys.modules.get("torch.autograd.profiler")
    return _NVTX or (profiler is not None and profiler._is_profiler_enabled)


def around(name: str) -> AbstractContextManager[Any] | None:
    """Return a range of this name, or None while torch cannot create one. Call it only if ``active()``."""
    torch: Any = sys.modules.get("torch")
    within: AbstractContextManager[Any] | None = None
    if torch is None:
        return within
    if torch.autograd.profiler._is_profiler_enabled:  # under emit_nvtx() this is an NVTX range
        within = torch.autograd.profiler.record_function(PREFIX + name)
    elif torch.cuda.is_initialized():  # torch may have been built without NVTX
        within = torch.cuda.nvtx.range(PREFIX + name)
    return within
