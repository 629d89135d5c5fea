"""Launch of other programs from a test: as one process, or under mpirun or torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forkserver import ForkServer

from mpitest import MPIRUN, TORCHRUN, mpi_environment, quick_start

# Copied before a test starts MPI in this process: the variables that MPI adds would break MPI in other programs.
ENVIRONMENT = quick_start(mpi_environment())
ENVIRONMENT["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{ENVIRONMENT['PATH']}"


def python(
    *arguments: str,
    ranks: int | None = None,
    torchrun: Sequence[str] | None = None,
    limit: float = 100,
    server: ForkServer | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python and wait for it to end.

    Args:
        *arguments: Arguments of Python: a program and its arguments, or for example ``-c`` and code.
        ranks: World size under mpirun; None: one process without MPI.
        torchrun: Options of torchrun, which then starts the ranks instead of mpirun.
        limit: Seconds after which the program is killed.
        server: Server that forks the processes with modules imported; None: each process starts an interpreter.
        **variables: Variables added to the environment.
    """
    launcher = [] if ranks is None else [*(MPIRUN if torchrun is None else TORCHRUN), str(ranks), *(torchrun or ())]
    interpreter = [sys.executable] if server is None else server.stub
    return subprocess.run(
        [*launcher, *interpreter, *arguments],
        env={**ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
