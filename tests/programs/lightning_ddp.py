"""Trains with Lightning's DDP strategy, whose exchange is DDP's own or sparse: start it with mpirun."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from ddp_front_end import register
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from small_task import data, network, options, report
from torch.utils.data import DataLoader, DistributedSampler

import horovod_sparse as hvs


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
        return torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)

    def on_train_start(self) -> None:
        # DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...) registers the hook on GPUs only; on the CPU it is ignored.
        register(self.trainer.strategy.model, self.trainer.optimizers[0], self.options)


def main() -> None:
    chosen = options(__doc__)
    hvs.ddp.init_process_group("gloo")
    learner = Learner(chosen)
    sampler = DistributedSampler(data(), seed=3)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(),
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
    report(dist.get_rank(), learner.net, trainer.global_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
