"""Prints by how many bytes an element the memory grows when a bucket is made and exchanges."""

import re
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from horovod_sparse.compression import Sparse
from horovod_sparse.pipeline import Pipeline

SIZE = 50_000_000


def peak() -> int:
    """Largest resident size in bytes; Linux counts from the last reset."""
    kilobytes = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert kilobytes
    return int(kilobytes[1]) * 1024


gradient = np.random.default_rng(1).standard_normal(SIZE, np.float32)
Path("/proc/self/clear_refs").write_text("5")  # resets the largest size to the present one
start = peak()
pipeline = Pipeline(Sparse(float(sys.argv[1])), SIZE, np.zeros(0, np.float32), MPI.COMM_SELF)
for _ in range(3):
    pipeline.run([(0, gradient)], [(0, gradient)])
print((peak() - start) / SIZE)
