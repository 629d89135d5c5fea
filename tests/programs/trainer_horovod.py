"""Trains with Hugging Face's Trainer, which knows of one process only, and Horovod's front end."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import horovod.torch as hvd
import torch
from small_task import distribute, options, report
from torch.utils.data import DistributedSampler
from trainer_task import Network, arguments, samples
from transformers import Trainer


class SharedTrainer(Trainer):
    """A Trainer that gives each rank its own share of the samples, and exchanges before it clips."""

    def _get_train_sampler(self, *_: Any) -> DistributedSampler[Any]:
        return DistributedSampler(self.train_dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=3)

    def training_step(self, *arguments: Any, **settings: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **settings)
        # The norm of the gradients is taken next, by a function that writes them, also where nothing is clipped.
        if self.accelerator.sync_gradients:
            self.optimizer.optimizer.synchronize()
        return loss


def alone() -> None:
    """Makes Accelerate, which looks for other processes in these variables, believe that this one is alone."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)


def main() -> None:
    chosen = options(__doc__)
    hvd.init()
    alone()
    model = Network()
    optimizer = distribute(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), model, chosen)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SharedTrainer(
            model, arguments(folder, chosen), train_dataset=samples(), optimizers=(optimizer, schedule)
        )
        trainer.train()
    report(hvd.rank(), model.net, trainer.state.global_step)


if __name__ == "__main__":
    main()
