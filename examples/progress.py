"""Progress bar that stays readable without a terminal."""

from __future__ import annotations

import math
import sys
from typing import Any, NoReturn

from tqdm import tqdm

LINES = 10


class _Lines:
    """Text stream that writes each state of the bar on a new line instead of overwriting the previous one."""

    def write(self, text: str) -> int:
        state = text.strip("\r\n ")
        return sys.stderr.write(f"{state}\n") if state else 0

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(steps: int, show: bool) -> tqdm[NoReturn]:
    """Return a progress bar on stderr, for use in a ``with`` block.

    mpirun and horovodrun forward stderr line by line, so the bar cannot be redrawn. It then prints about ten lines.

    Args:
        steps: Expected number of ``update`` calls.
        show: Whether this rank shows the bar.
    """
    if sys.stderr.isatty():
        return tqdm(total=steps, disable=not show, unit="step")
    # Keep time-based updates and tqdm's monitor thread from adding lines.
    quiet: dict[str, Any] = {"miniters": max(1, steps // LINES), "mininterval": 0, "maxinterval": math.inf}
    return tqdm(total=steps, disable=not show, unit="step", ncols=100, file=_Lines(), **quiet)
