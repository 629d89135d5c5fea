"""Python calls that one bucket's step makes inside the package.

Run by ``mpirun -np 2 python -m benchmarks.kernels.calls [SPEC ...]``.

For each configuration the largest number of some steps, counted by ``sys.setprofile`` around ``Pipeline.run``; with the
files that the calls were in, and how often one file called another.
"""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

import horovod_sparse as hvs
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.transport.mpi import MPITransport

_SIZE = 100_000
_STEPS = 100
_PACKAGE = str(hvs.__path__[0])


def count(spec: str, comm: MPI.Intracomm) -> tuple[int, int, int]:
    """Calls, files and changes of file in the step with most calls."""
    gradient = np.random.default_rng(comm.Get_rank()).standard_normal(_SIZE, np.float32)
    output = np.empty_like(gradient)
    pipeline = pipeline_for(hvs.parse(spec), _SIZE, gradient, MPITransport(comm))
    most = (0, 0, 0)
    for _ in range(_STEPS):
        files: list[str] = []

        def note(frame: FrameType, event: str, _: Any, files: list[str] = files) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
                files.append(frame.f_code.co_filename)

        sys.setprofile(note)
        pipeline.run([(0, gradient)], [(0, output)])
        sys.setprofile(None)
        changes = sum(one != other for one, other in itertools.pairwise(files))
        most = max(most, (len(files), len(set(files)), changes))
    return most


def main() -> None:
    """Prints a line for each configuration given, or for the usual ones."""
    comm = MPI.COMM_WORLD
    for spec in sys.argv[1:] or ["topka", "gtopk", "topkdsa", "oktopk", "randomblock", "dense"]:
        calls, files, changes = count(spec, comm)
        if comm.Get_rank() == 0:
            print(f"{spec}: {calls} calls in {files} files, {changes} changes of file", flush=True)


if __name__ == "__main__":
    main()
