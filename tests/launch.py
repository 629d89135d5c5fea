"""Starts other programs from a test: as one process, or under mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mpitest import mpi_environment, quick_start

# Taken before a test starts MPI in this process: what that adds would keep other programs from starting theirs.
ENVIRONMENT = quick_start(mpi_environment())
ENVIRONMENT["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{ENVIRONMENT['PATH']}"


def python(
    *arguments: str, ranks: int | None = None, limit: float = 100, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python, on a number of ranks or as a process of its own, for at most ``limit`` seconds.

    Further keywords are added to its environment.
    """
    launcher = [] if ranks is None else ["mpirun", "-np", str(ranks)]
    return subprocess.run(
        [*launcher, sys.executable, *arguments],
        env={**ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
