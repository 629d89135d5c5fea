"""Trains with Lightning's DDP strategy, whose exchange is DDP's own or sparse: start it with mpirun or torchrun."""

from __future__ import annotations

import argparse

import lightning_task
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from small_task import in_process_group, options, register, report


class Learner(lightning_task.Learner):
    """Registers the hook when DDP has wrapped the model."""

    def on_train_start(self) -> None:
        # DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...) registers the hook on GPUs only; on the CPU it is ignored.
        register(self.trainer.strategy.model, self.trainer.optimizers[0], self.options)


def train(chosen: argparse.Namespace) -> None:
    learner = Learner(chosen)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    report(rank, learner.net, lightning_task.fit(learner, rank, ranks, devices=ranks, strategy=DDPStrategy()))


if __name__ == "__main__":
    in_process_group(train, options(__doc__))
