"""A small training with everything that has a state, for the tests of checkpoints."""

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
    """Sets the global generators."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the state of this generator is what is tested
    torch.manual_seed(seed)


class Training:
    """Dropout, batch normalization, a schedule, a loss scale, and inputs from all generators."""

    def __init__(self, compression: str, rank: int, momentum: float = 0.0, amp: bool = False, **wrapping: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.Linear(24, 4))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=amp)
        chosen = hvs.parse(f"{compression},dense_below=0,bucket_bytes=1200")
        plain = sgd(self.model, momentum=momentum)
        self.optimizer = wrap(self.model, chosen, plain, grad_scaler=self.scaler, **wrapping)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.5)
        reseed(rank)
        self.losses: list[float] = []

    @property
    def states(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

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
        """What two runs that do the same have in common."""
        return [*snapshot(self.model), *self.model.buffers(), torch.tensor(self.losses, dtype=torch.float64)]


def sign(folder: Path) -> Manifest:
    """Writes a manifest that fits the files of a checkpoint as they are now."""
    known = json.loads((folder / "manifest.json").read_text())
    contents = {name: (folder / name).read_bytes() for name in known["files"]}
    files = {name: Entry(len(one), hashlib.sha256(one).hexdigest()) for name, one in contents.items()}
    manifest = Manifest(known["step"], known["number"], known["ranks"], files)
    manifest.write(folder)
    return manifest


def refusal(comm: Any, attempt: Any) -> str:
    """The message with which an attempt fails, the same on all ranks."""
    message = None
    try:
        attempt()
    except CheckpointError as error:
        message = str(error)
    messages = comm.allgather(message)
    assert None not in messages, messages
    assert len(set(messages)) == 1, messages
    return messages[0]
