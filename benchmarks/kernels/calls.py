"""Python calls inside the package during one bucket's step.

Run by ``mpirun -np 2 python -m benchmarks.kernels.calls [SPEC ...]``.

For each configuration, the output shows the median step: the number of calls, the number of files that they were in,
and how often consecutive calls were in different files. ``sys.setprofile`` counts the calls during ``Pipeline.run``.
Ranks spin while they wait, as polls would be counted otherwise.
"""

from __future__ import annotations

import itertools
import os
import sys
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

import horovod_sparse as hvs
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.transport.mpi import MPITransport
from horovod_sparse.transport.waiting import SETTING

_SIZE = 100_000
_STEPS = 100
_PACKAGE = str(hvs.__path__[0])


def count(spec: str, comm: MPI.Intracomm) -> tuple[int, int, int]:
    """Return the calls, files and changes of file in the median step, ordered by calls."""
    gradient = np.random.default_rng(comm.Get_rank()).standard_normal(_SIZE, np.float32)
    output = np.empty_like(gradient)
    pipeline = pipeline_for(hvs.parse(spec), _SIZE, gradient, MPITransport(comm))
    counts = []
    for _ in range(_STEPS):
        files: list[str] = []

        def note(frame: FrameType, event: str, _: Any, files: list[str] = files) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
                files.append(frame.f_code.co_filename)

        sys.setprofile(note)
        pipeline.run([(0, gradient)], [(0, output)])
        sys.setprofile(None)
        changes = sum(last != file for last, file in itertools.pairwise(files))
        counts.append((len(files), len(set(files)), changes))
    return sorted(counts)[_STEPS // 2]


def main() -> None:
    """Print a line for each given configuration, or for the default ones."""
    os.environ.setdefault(SETTING, "spin")
    comm = MPI.COMM_WORLD
    for spec in sys.argv[1:] or ["topka", "gtopk", "topkdsa", "oktopk", "randomblock", "dense"]:
        calls, files, changes = count(spec, comm)
        if comm.Get_rank() == 0:
            print(f"{spec}: {calls} calls in {files} files, {changes} changes of file", flush=True)


if __name__ == "__main__":
    main()
