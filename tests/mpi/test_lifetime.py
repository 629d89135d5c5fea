"""MPI_Finalize waits for the threads that are inside MPI."""

from __future__ import annotations

import launch

PROGRAM = """
import threading, time
from mpi4py import MPI
from horovod_sparse.mpi.lifetime import inside_mpi

entered = threading.Event()

def exchange():
    with inside_mpi():
        entered.set()
        time.sleep(0.5)
        print("finalized inside" if MPI.Is_finalized() else "inside", flush=True)

worker = threading.Thread(target=exchange)
worker.start()
entered.wait()
MPI.Finalize()
print("finalized", flush=True)
try:
    with inside_mpi():
        print("inside again")
except RuntimeError as error:
    print(error)
"""


def test_mpi_is_finalized_only_when_no_thread_is_inside():
    result = launch.python("-c", PROGRAM)
    lines = result.stdout.splitlines()
    assert lines[:2] == ["inside", "finalized"], result.stderr
    assert lines[2].startswith("nothing can be exchanged: Horovod has been shut down")
