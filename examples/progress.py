"""A progress bar that is also readable where there is no terminal."""

from __future__ import annotations

import math
import sys
from typing import Any, NoReturn

from tqdm import tqdm

LINES = 10


class _Lines:
    """A text stream that writes each state of the bar on a line of its own instead of over the last one."""

    def write(self, text: str) -> int:
        state = text.strip("\r\n ")
        return sys.stderr.write(f"{state}\n") if state else 0

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(steps: int, show: bool) -> tqdm[NoReturn]:
    """A bar on stderr, to be used in a ``with`` block.

    mpirun and horovodrun pass stderr on as lines, where no bar can move; it then comes as some ten lines.

    Args:
        steps: Calls of ``update`` to expect.
        show: False for the ranks that keep quiet.
    """
    if sys.stderr.isatty():
        return tqdm(total=steps, disable=not show, unit="step")
    # Neither the clock nor tqdm's monitor may add lines.
    quiet: dict[str, Any] = {"miniters": max(1, steps // LINES), "mininterval": 0, "maxinterval": math.inf}
    return tqdm(total=steps, disable=not show, unit="step", ncols=100, file=_Lines(), **quiet)
