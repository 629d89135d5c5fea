"""Trains with Hugging Face's Trainer, whose DDP exchange is its own or sparse: start it with mpirun or torchrun."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_task import in_process_group, options, report, trained
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from trainer_task import Network, arguments, samples
from transformers import Trainer, TrainerCallback

import horovod_sparse as hvs


class ShardedTrainer(Trainer):
    """A Trainer with the same samples on each rank as the other programs."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        sampler = DistributedSampler(self.train_dataset, seed=3)
        return DataLoader(self.train_dataset, batch_size=8, sampler=sampler, collate_fn=self.data_collator)


class Sparse(TrainerCallback):
    def __init__(self, compression):
        self.compression, self.trainer, self.state = compression, None, None

    def on_train_begin(self, arguments, state, *others, **settings):
        model = self.trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            raise RuntimeError(
                f"rank {dist.get_rank()}: the Trainer left the model without DDP: pass use_cpu=True on CPUs, and "
                "eval_on_start=True instead of calling evaluate() before train()"
            )
        optimizer = self.trainer.optimizer.optimizer
        self.state = hvs.ddp.SparseState(self.compression, optimizer, model.named_parameters())
        model.register_comm_hook(self.state, hvs.ddp.sparse_hook)
        if state.global_step:  # resumed
            self.load(self.residuals(arguments, state))

    def load(self, file):
        if not file.exists():
            raise RuntimeError(
                f"rank {dist.get_rank()}: {file} is missing: resume in the same output_dir on the number of ranks that "
                "saved it; hvs.checkpoint merges the residuals of other numbers"
            )
        self.state.load_state_dict(torch.load(file, weights_only=True))

    def on_save(self, arguments, state, *others, **settings):
        torch.save(self.state.state_dict(), self.residuals(arguments, state))

    @staticmethod
    def residuals(arguments, state):
        name = f"residuals-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
        return Path(arguments.output_dir, f"checkpoint-{state.global_step}", name)


class Ordering(TrainerCallback):
    """Orders the samples of each epoch."""

    def on_epoch_begin(self, settings: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
        train_dataloader.sampler.set_epoch(round(state.epoch))


def trainer_of(chosen: argparse.Namespace, folder: str) -> Trainer:
    """Returns a Trainer of a new model."""
    model, callbacks = Network(chosen.lora), [Ordering()]
    optimizer = torch.optim.SGD(trained(model), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    if chosen.compression != "none":
        callbacks.append(Sparse(hvs.parse(chosen.compression)))
    trainer = ShardedTrainer(
        model,
        arguments(folder, chosen),
        train_dataset=samples(),
        eval_dataset=samples(),
        optimizers=(optimizer, schedule),
        callbacks=callbacks,
    )
    callbacks[-1].trainer = trainer
    return trainer


def train(chosen: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as own:
        trainer = trainer_of(chosen, chosen.folder or own)
        assert trainer.args.world_size == dist.get_world_size()
        if chosen.evaluate_first:
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=chosen.resume)
        report(dist.get_rank(), trainer.model.net, trainer.state.global_step)


if __name__ == "__main__":
    in_process_group(train, options(__doc__))
