"""Trains on all ranks until rank 1 leaves without a word, in the way and while the others wait where the arguments say.

    leave.py shutdown|finalize|thread|exit  step|preempted|construction  [mpi4py]

With the last argument, mpi4py starts and ends MPI; else Horovod does.
"""

from __future__ import annotations

import sys
import threading
import time

if "mpi4py" in sys.argv:
    from mpi4py import MPI  # noqa: F401 - starts MPI

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()

import horovod_sparse as hvs  # noqa: E402

way, place = sys.argv[1:3]
RANK = hvd.rank()
model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100))


def wrap():
    return hvs.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=hvs.Compression.topka(density=0.1, bucket_bytes=40_000),
    )


def leave() -> None:
    if way == "shutdown":
        hvd.shutdown()
        print("shut down", flush=True)
        time.sleep(1000)  # evaluates, say
    elif way == "finalize":
        from mpi4py import MPI

        MPI.Finalize()
    elif way == "thread":
        thread = threading.Thread(target=lambda: {}["the data set is gone"], name="reader")
        thread.start()
        time.sleep(1000)  # waits for what the thread would have read
    sys.exit(3)


optimizer = wrap()
with hvs.checkpoint.on_preemption() as preempted:
    for step in range(20):
        optimizer.zero_grad()
        if step == 3 and RANK == 1:
            leave()
        if step == 3 and place == "construction":
            optimizer = wrap()
        if place == "preempted":
            preempted()
        model(torch.randn(4, 100)).square().mean().backward()
        optimizer.step()
print("trained")
