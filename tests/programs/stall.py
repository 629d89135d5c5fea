"""Trains on all ranks; rank 1 sleeps after step 2, rank 2 is stopped in step 4 and stays so."""

from __future__ import annotations

import os
import signal
import time

import horovod.torch as hvd
import torch
from torch import nn

import horovod_sparse as hvs
from horovod_sparse.control import watch

hvd.init()
watch._PERIOD, watch._PATIENCE = 0.2, 1.5  # looks often, and waits less for an answer
model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100), nn.Linear(100, 10))
optimizer = hvs.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression=hvs.Compression.topka(density=0.1, bucket_bytes=40_000),
    stall_timeout=3,
    stall_abort=6,
)
with hvs.checkpoint.on_preemption() as preempted:
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 100)).square().mean()
        if step == 4 and hvd.rank() == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        loss.backward()
        optimizer.step()
        print(f"rank {hvd.rank()} has made step {step}", flush=True)
        if step == 2 and hvd.rank() == 1:
            time.sleep(5)
        assert not preempted()
