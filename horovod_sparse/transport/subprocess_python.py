"""Python subprocesses outside the MPI job, with a timeout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

# A subprocess of a rank under mpirun or srun must not join the job as that rank.
_LAUNCHER_VARIABLES = re.compile(r"PMI|OMPI_(COMM_WORLD|UNIVERSE|MCA_(ess|orte|pmix|ras|plm))|ORTE_|SLURM_")


def run_python(arguments: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """Run Python in a subprocess that may start MPI, crash or hang. The working directory is empty.

    Args:
        arguments: Arguments of the Python interpreter.
        timeout: Seconds after which the process group of the subprocess is killed.

    Returns:
        Exit status, negative for a signal, or None after a timeout; and the output, including standard error.
    """
    env = {key: value for key, value in os.environ.items() if not _LAUNCHER_VARIABLES.match(key)}
    # A file, not a pipe: a helper process that MPI leaves behind would keep a pipe open.
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
