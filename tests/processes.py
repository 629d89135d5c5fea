"""Processes that a test has started, anywhere in the process tree."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

_VARIABLE = b"HOROVOD_SPARSE_TEST"
_RANK = b"OMPI_COMM_WORLD_RANK"


class Mark:
    """Mark in the environment, which child processes inherit."""

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex.encode()

    @property
    def variables(self) -> dict[str, str]:
        """Variables to add to the environment."""
        return {_VARIABLE.decode(): self._value.decode()}

    def processes(self) -> list[int]:
        """Return the IDs of all processes that carry the mark."""
        return [pid for pid, environment in _environments() if environment.get(_VARIABLE) == self._value]

    def ranks(self) -> dict[int, int]:
        """Return the process IDs of the ranks, by rank, without processes that the ranks have started."""
        found: dict[int, int] = {}
        for pid, environment in _environments():
            if environment.get(_VARIABLE) == self._value and _RANK in environment:
                found.setdefault(int(environment[_RANK]), pid)
        return found

    def gone(self, limit: float = 10) -> bool:
        """Wait up to ``limit`` seconds for all marked processes to end; return whether they have."""
        end = time.monotonic() + limit
        while self.processes():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


def _environments() -> list[tuple[int, dict[bytes, bytes]]]:
    """Return the environments of all readable processes, in the order of their IDs; zombies have none."""
    found = []
    for entry in sorted((path for path in Path("/proc").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)):
        try:
            content = (entry / "environ").read_bytes()
        except OSError:
            continue
        pairs = (pair.partition(b"=") for pair in content.split(b"\0"))
        found.append((int(entry.name), {name: value for name, _, value in pairs}))
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> int:
    """Return the number of open file descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
