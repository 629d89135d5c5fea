"""Trains with Hugging Face's Trainer, whose DDP exchange is its own or sparse: start it with mpirun or torchrun."""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from small_task import in_process_group, options, register, report
from torch.utils.data import DataLoader, DistributedSampler
from trainer_task import Network, arguments, samples
from transformers import Trainer, TrainerCallback


class ShardedTrainer(Trainer):
    """A Trainer with the same samples on each rank as the other programs."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        sampler = DistributedSampler(self.train_dataset, seed=3)
        return DataLoader(self.train_dataset, batch_size=8, sampler=sampler, collate_fn=self.data_collator)


class Registering(TrainerCallback):
    """Registers the hook when DDP has wrapped the model, and gives each epoch its order of samples."""

    def __init__(self, chosen: Any) -> None:
        self.trainer: Any = None
        self._chosen = chosen

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        register(self.trainer.model_wrapped, self.trainer.optimizer.optimizer, self._chosen)

    def on_epoch_begin(self, settings: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
        train_dataloader.sampler.set_epoch(round(state.epoch))


def train(chosen: argparse.Namespace) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    with tempfile.TemporaryDirectory() as folder:
        settings, registering = arguments(folder, chosen), Registering(chosen)
        trainer = ShardedTrainer(
            model, settings, train_dataset=samples(), optimizers=(optimizer, schedule), callbacks=[registering]
        )
        registering.trainer = trainer
        assert settings.world_size == dist.get_world_size()
        trainer.train()
    report(dist.get_rank(), model.net, trainer.state.global_step)


if __name__ == "__main__":
    in_process_group(train, options(__doc__))
