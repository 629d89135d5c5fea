"""Spans, and the Chrome trace that is made of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work.

    Attributes:
        name: The stage.
        start: Begin in ns since the epoch, by the monotonic clock.
        duration: Length in ns; on a device, of its work.
        thread: Name of the thread that did the work.
        details: What else is known, such as the bucket's number.
    """

    name: str
    start: int
    duration: int
    thread: str
    details: dict[str, Any]


def write(path: str | os.PathLike[str], ranks: Sequence[Sequence[Span]]) -> None:
    """Writes every rank's spans, one process a rank and one track a thread.

    Args:
        path: File to write; written beside and renamed, so that a reader never sees half of it.
        ranks: The spans of each rank.
    """
    events = [event for rank, recorded in enumerate(ranks) for event in _events(rank, recorded)]
    target = Path(path)
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    beside.replace(target)


def _events(rank: int, recorded: Sequence[Span]) -> list[dict[str, Any]]:
    """One rank's spans as trace events; times in microseconds, as the format wants them."""
    threads = {name: number for number, name in enumerate(sorted({one.thread for one in recorded}))}
    names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    names += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
        for name, number in threads.items()
    ]
    return names + [
        {
            "ph": "X",
            "name": one.name,
            "pid": rank,
            "tid": threads[one.thread],
            "ts": one.start / 1e3,
            "dur": one.duration / 1e3,
            "args": one.details,
        }
        for one in recorded
    ]
