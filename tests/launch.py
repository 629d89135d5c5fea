"""Starts other programs from a test: as one process, or under mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from forkserver import ForkServer

from mpitest import mpi_environment, quick_start

# Taken before a test starts MPI in this process: what that adds would keep other programs from starting theirs.
ENVIRONMENT = quick_start(mpi_environment())
ENVIRONMENT["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{ENVIRONMENT['PATH']}"


def python(
    *arguments: str,
    ranks: int | None = None,
    limit: float = 100,
    server: ForkServer | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python and wait for it to end.

    Args:
        arguments: A program and its arguments, or what else Python takes, such as ``-c`` and code.
        ranks: World size under mpirun; None: one process without MPI.
        limit: Seconds after which the program is killed.
        server: Forks the processes, which then need not import torch; None: each starts an interpreter.
        variables: Added to the environment.
    """
    launcher = [] if ranks is None else ["mpirun", "-np", str(ranks)]
    interpreter = [sys.executable] if server is None else server.stub
    return subprocess.run(
        [*launcher, *interpreter, *arguments],
        env={**ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
