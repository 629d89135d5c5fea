"""Processes that a test has started, anywhere in the process tree."""

from __future__ import annotations

import subprocess
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
        return [pid for pid, _ in self._marked()]

    def ranks(self) -> dict[int, int]:
        """Return the process IDs of the ranks, by rank, without processes that the ranks have started."""
        found = [(int(environment[_RANK]), pid) for pid, environment in self._marked() if _RANK in environment]
        return dict(reversed(found))  # the lowest process ID of each rank

    def _marked(self) -> list[tuple[int, dict[bytes, bytes]]]:
        return [found for found in environments() if found[1].get(_VARIABLE) == self._value]

    def gone(self, limit: float = 10) -> bool:
        """Wait up to ``limit`` seconds for all marked processes to end; return whether they have."""
        end = time.monotonic() + limit
        while self.processes():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


def terminate(process: subprocess.Popen[bytes], limit: float = 20) -> None:
    """Terminate a process that may have ended already; kill it after ``limit`` seconds."""
    process.terminate()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environments() -> list[tuple[int, dict[bytes, bytes]]]:
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
