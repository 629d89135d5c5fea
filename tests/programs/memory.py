"""Prints by how many bytes an element the memory grows when buckets are made and exchange.

memory.py SPEC BUCKETS, with the text form of a compression.
"""

import re
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from horovod_sparse.config import parse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import Conditions
from horovod_sparse.transport.mpi import MPITransport

SIZE = 20_000_000  # of all buckets


def peak() -> int:
    """Largest resident size in bytes; Linux counts from the last reset."""
    kilobytes = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert kilobytes
    return int(kilobytes[1]) * 1024


spec, buckets = sys.argv[1], int(sys.argv[2])
gradient = np.random.default_rng(1).standard_normal(SIZE // buckets, np.float32)
Path("/proc/self/clear_refs").write_text("5")  # resets the largest size to the present one
start = peak()
like = np.zeros(0, np.float32)
transport = MPITransport(MPI.COMM_SELF)
pipelines = [pipeline_for(parse(spec), gradient.size, like, transport, number=number) for number in range(buckets)]
for _ in range(3):
    for pipeline in pipelines:
        pipeline.run([(0, gradient)], [(0, gradient)], Conditions())
print((peak() - start) / SIZE)
