"""Prints the cost model's inputs, as measured on all ranks together, as JSON; run under mpirun."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
from mpi4py import MPI

from horovod_sparse.measure import measure_compute, measure_link

if __name__ == "__main__":
    link = measure_link(MPI.COMM_WORLD)
    compute = measure_compute(np.empty(0, np.float32), MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"link": asdict(link), "compute": asdict(compute)}))
