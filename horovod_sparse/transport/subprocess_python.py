"""Programs beside this one: started as if no launcher had started it, and ended when their time is up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

# A program started below mpirun or srun must not take the place of the rank that started it.
_LAUNCHER_VARIABLES = re.compile(r"PMI|OMPI_(COMM_WORLD|UNIVERSE|MCA_(ess|orte|pmix|ras|plm))|ORTE_|SLURM_")


def run_python(arguments: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """Runs Python in an empty folder, as a process of its own that may start MPI, crash or hang.

    Args:
        arguments: Of Python.
        timeout: Seconds after which it is ended, with whatever it has started.

    Returns:
        Its exit status, negative for a signal; None: it did not end in time. What it wrote, errors included.
    """
    env = {key: value for key, value in os.environ.items() if not _LAUNCHER_VARIABLES.match(key)}
    # A file, not a pipe: a helper that MPI leaves behind would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        output.seek(0)
        return status, output.read()
