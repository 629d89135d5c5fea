"""Small training with every kind of state, for the tests of checkpoints."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from training import sgd, snapshot, wrap

import horovod_sparse as hvs
from horovod_sparse.checkpoint import CheckpointError
from horovod_sparse.checkpoint.manifest import Entry, Manifest


def reseed(seed: int) -> None:
    """Seed the global random generators."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the test is about the state of this generator
    torch.manual_seed(seed)


class Training:
    """Training with dropout, batch normalization, a schedule, a loss scale, and inputs from all generators."""

    def __init__(self, compression: str, rank: int, momentum: float = 0.0, amp: bool = False, **wrapping: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.Linear(24, 4))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=amp)
        chosen = hvs.parse(f"{compression},dense_below=0,bucket_bytes=1200")
        plain = sgd(self.model, momentum=momentum)
        self.optimizer = wrap(self.model, chosen, plain, grad_scaler=self.scaler, **wrapping)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.5)
        self.states = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }
        reseed(rank)
        self.losses: list[float] = []

    def train(self, steps: int) -> Training:
        for _ in range(steps):
            self.optimizer.zero_grad()
            shift = random.random() + float(np.random.rand())  # noqa: NPY002
            loss = self.model(torch.randn(8, 12) + shift).square().mean()
            self.scaler.scale(loss).backward()
            self.optimizer.synchronize()
            with self.optimizer.skip_synchronize():
                self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.losses.append(loss.item())
        return self

    def bits(self) -> list[torch.Tensor]:
        """Return tensors that must be bit-identical in equivalent runs."""
        return [*snapshot(self.model), *self.model.buffers(), torch.tensor(self.losses, dtype=torch.float64)]


def sign(folder: Path) -> Manifest:
    """Write a manifest that matches the current files of a checkpoint."""
    known = json.loads((folder / "manifest.json").read_text())
    contents = {name: (folder / name).read_bytes() for name in known["files"]}
    files = {name: Entry(len(one), hashlib.sha256(one).hexdigest()) for name, one in contents.items()}
    manifest = Manifest(known["step"], known["number"], known["ranks"], files)
    manifest.write(folder)
    return manifest


def refusal(comm: Any, attempt: Any) -> str:
    """Return the message of the CheckpointError that an attempt raises, the same on all ranks."""
    message = None
    try:
        attempt()
    except CheckpointError as error:
        message = str(error)
    messages = comm.allgather(message)
    assert None not in messages, messages
    assert len(set(messages)) == 1, messages
    return messages[0]
