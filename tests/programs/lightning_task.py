"""The small task as Lightning wants it, for the programs that train with its Trainer."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from small_task import data, network, trained
from torch.utils.data import DataLoader, DistributedSampler


class Learner(LightningModule):
    """The network and its loss."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.net = network(options.lora)
        self.options = options

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(trained(self.net), lr=0.02, momentum=0.9)


def fit(learner: Learner, rank: int, ranks: int, **settings: Any) -> int:
    """Trains on this rank's share of the samples; returns the number of steps."""
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=learner.options.epochs,
        accumulate_grad_batches=learner.options.accumulate,
        gradient_clip_val=learner.options.clip or None,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    sampler = DistributedSampler(data(), num_replicas=ranks, rank=rank, seed=3)
    trainer.fit(learner, DataLoader(data(), batch_size=8, sampler=sampler))
    return trainer.global_step
