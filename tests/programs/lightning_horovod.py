"""Trains with Lightning's Trainer, which knows of one process only, and Horovod's front_end: start it with mpirun."""

from __future__ import annotations

import argparse
from typing import Any

import horovod.torch as hvd
import torch
from horovod_door import clip, distribute
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from small_task import data, network, options, report
from torch.utils.data import DataLoader, DistributedSampler


class Learner(LightningModule):
    """The small task, as Lightning wants it."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.net = network()
        self.options = options

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)
        return distribute(optimizer, self.net, self.options)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if gradient_clip_val:
            clip(optimizer, self.net, gradient_clip_val)


def main() -> None:
    chosen = options(__doc__)
    hvd.init()
    learner = Learner(chosen)
    sampler = DistributedSampler(data(), num_replicas=hvd.size(), rank=hvd.rank(), seed=3)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[LightningEnvironment()],
        max_epochs=chosen.epochs,
        accumulate_grad_batches=chosen.accumulate,
        gradient_clip_val=chosen.clip or None,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(learner, DataLoader(data(), batch_size=8, sampler=sampler))
    report(hvd.rank(), learner.net, trainer.global_step)


if __name__ == "__main__":
    main()
