"""Spans as ranges of torch's profiler or NVTX while either is on. Torch is not imported here, only used if loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

PREFIX = "hvs."
# Nsight's tools, such as `nsys profile`, set this variable to receive a program's ranges.
_NVTX = "NVTX_INJECTION64_PATH" in os.environ


@contextmanager
def both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Nest two context managers in one."""
    with outer, inner:
        yield


def active() -> bool:
    """Return whether torch's profiler is on, or a tool records NVTX ranges."""
    profiler = sys.modules.get("torch.autograd.profiler")
    return _NVTX or (profiler is not None and profiler._is_profiler_enabled)


def around(name: str) -> AbstractContextManager[Any] | None:
    """Return a range of this name, or None while torch cannot create one. Call it only if ``active()``."""
    torch: Any = sys.modules.get("torch")
    within: AbstractContextManager[Any] | None = None
    if torch is not None and torch.autograd.profiler._is_profiler_enabled:  # under emit_nvtx() this is an NVTX range
        within = torch.autograd.profiler.record_function(PREFIX + name)
    elif torch is not None and torch.cuda.is_initialized():  # torch may have been built without NVTX
        within = torch.cuda.nvtx.range(PREFIX + name)
    return within
