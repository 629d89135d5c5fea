"""Spans, and their output as a Chrome trace."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """Time span of a piece of work.

    Attributes:
        name: Name of the stage.
        start: Start in ns since the epoch, by the monotonic clock.
        duration: Duration in ns; on a device, that of the work launched.
        thread: Name of the thread that did the work.
        details: Further JSON values, such as the bucket number.
    """

    name: str
    start: int
    duration: int
    thread: str
    details: dict[str, Any]


def write(path: str | os.PathLike[str], ranks: Sequence[Sequence[Span]]) -> None:
    """Write the spans of each rank under a temporary name, and rename the file: readers never see a partial one."""
    events = [event for rank, recorded in enumerate(ranks) for event in _events(rank, recorded)]
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    temporary.replace(target)


def _events(rank: int, recorded: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the trace events of one rank's spans; the format requires times in microseconds."""
    threads = {name: number for number, name in enumerate(sorted({span.thread for span in recorded}))}
    names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    names += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
        for name, number in threads.items()
    ]
    return names + [
        {
            "ph": "X",
            "name": span.name,
            "pid": rank,
            "tid": threads[span.thread],
            "ts": span.start / 1e3,
            "dur": span.duration / 1e3,
            "args": span.details,
        }
        for span in recorded
    ]
