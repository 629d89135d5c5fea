"""Saves checkpoints, or goes on from the newest one, and prints what the residuals of all ranks hold as an update.

checkpoint.py DIR save: saves step 4, and step 5, during which rank 1 is killed.
checkpoint.py DIR load: goes on, and saves step 6."""

import os
import signal
import sys

import horovod.torch as hvd
import torch
from torch import nn

import horovod_sparse as hvs

hvd.init()
folder, what = sys.argv[1:]
torch.manual_seed(0)
model = nn.Linear(50, 20)
optimizer = hvs.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.5),
    named_parameters=model.named_parameters(),
    compression=hvs.parse("oktopk:density=0.05,dense_below=0,bucket_bytes=2000"),
)
checkpoints = hvs.checkpoint.Checkpoints(folder)


def owed() -> torch.Tensor:
    """By parameter, of all ranks."""
    buckets = optimizer.compression_state_dict()["buckets"]
    mine = torch.stack([bucket["unit"] * bucket["memory"]["residual"].double().sum() for bucket in buckets])
    return hvd.allreduce(mine, op=hvd.Sum, name="owed")


def train(steps: int) -> None:
    torch.manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 50) + 1).square().mean().backward()
        optimizer.step()


restored = checkpoints.load(model=model, optimizer=optimizer)
if what == "load":
    assert restored is not None
    print(f"rank {hvd.rank()} goes on from {restored.step}: {restored.notes[0]}")
else:
    train(4)
if hvd.rank() == 0:
    print("owed", *(f"{one:.9e}" for one in owed().tolist()), flush=True)
else:
    owed()
if what == "load":
    train(1)
    checkpoints.save(6, model=model, optimizer=optimizer)
else:
    checkpoints.save(4, model=model, optimizer=optimizer)
    if hvd.rank() == 1:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(5, model=model, optimizer=optimizer)
