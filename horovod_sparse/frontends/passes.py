"""Backward passes in progress."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.autograd import Variable


class BackwardPass:
    """The last backward pass that a front end has followed.

    Torch frees the callback of a pass when the pass has ended, also if it fails. So it shows whether the pass is in
    progress, where a flag that the callback clears would stay set.
    """

    def __init__(self) -> None:
        self._callback: Callable[[], Any] = lambda: None

    @property
    def in_progress(self) -> bool:
        """True until the pass has ended or failed."""
        return self._callback() is not None

    def begin(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Follow the backward pass that calls this.

        Args:
            at_end: Called at its end, unless it fails.
        """
        callback = functools.partial(at_end)
        self._callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)
