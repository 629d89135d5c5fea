"""Saved and loaded, a training goes on with the bits of an uninterrupted one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from laws import everywhere
from torch import nn
from training import snapshot

import horovod_sparse as hvs
from horovod_sparse.checkpoint import CheckpointError, Checkpoints

pytestmark = pytest.mark.mpi

COMPRESSIONS = [
    "oktopk:density=0.05,tau_threshold=3,tau_partition=2",
    "topka:density=0.05,memory=momentum,momentum=0.9",
    "randomk:density=0.05,memory=conef,compressor=quantize",
    "gtopk:density=0.05,memory=improved,version=2",
    "stable:density=0.1,block=8,refresh=3",
    "gravac:density=0.2,window=2,cf_max=40",
    "hierarchical:density=0.05,node_ranks=2",
]


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))


class Training:
    """A small training with everything that has a state: dropout, batch normalization, schedule, scaler, generators."""

    def __init__(self, compression: str, rank: int, momentum: float = 0.0, amp: bool = False) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.Linear(24, 4))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=amp)
        self.optimizer = hvs.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=momentum),
            named_parameters=self.model.named_parameters(),
            compression=hvs.parse(f"{compression},dense_below=0,bucket_bytes=1200"),
            grad_scaler=self.scaler,
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.5)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(rank)
        self.losses: list[float] = []

    def states(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            shift = random.random() + float(np.random.rand())
            x = torch.randn(8, 12) + shift
            loss = self.model(x).square().mean()
            self.scaler.scale(loss).backward()
            self.optimizer.synchronize()
            with self.optimizer.skip_synchronize():
                self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.losses.append(loss.item())
        return self

    def bits(self):
        return [*snapshot(self.model), *self.model.buffers(), torch.tensor(self.losses, dtype=torch.float64)]


def same(first, second):
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(hvd, comm, folder, compression):
    settings = {"momentum": 0.0 if "momentum" in compression else 0.9, "amp": "oktopk" in compression}
    checkpoints, rank = Checkpoints(folder), comm.Get_rank()
    run = Training(compression, rank, **settings).train(4)
    checkpoints.save(4, **run.states(), data={"losses": run.losses})
    run.train(4)
    resumed = Training(compression, rank, **settings)
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    restored = checkpoints.load(**resumed.states())
    resumed.losses = restored.data["losses"]
    assert everywhere(comm, restored.step == 4 and restored.notes == ())
    assert everywhere(comm, same(run.bits(), resumed.train(4).bits()))
