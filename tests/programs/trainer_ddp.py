"""Trains with Hugging Face's Trainer, whose DDP exchange is its own or sparse: start it with mpirun or torchrun."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_task import in_process_group, options, register, report, trained
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from trainer_task import Network, arguments, samples
from transformers import Trainer, TrainerCallback


class ShardedTrainer(Trainer):
    """A Trainer with the same samples on each rank as the other programs."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        sampler = DistributedSampler(self.train_dataset, seed=3)
        return DataLoader(self.train_dataset, batch_size=8, sampler=sampler, collate_fn=self.data_collator)


class Registering(TrainerCallback):
    """Registers the hook when DDP has wrapped the model, saves the residuals, and orders the samples of each epoch."""

    def __init__(self, chosen: Any) -> None:
        self.trainer: Any = None
        self._chosen = chosen
        self._state: Any = None

    def on_train_begin(self, settings: Any, *_: Any, **__: Any) -> None:
        model = self.trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            raise RuntimeError(
                f"rank {dist.get_rank()}: the Trainer left the model without DDP, so that each rank would train alone, "
                "as after evaluate() before train(): evaluate with another Trainer, of a copy of the model"
            )
        self._state = register(model, self.trainer.optimizer.optimizer, self._chosen)
        if self.resumed:
            self._state.load_state_dict(torch.load(self._residuals(self.resumed), weights_only=True))

    resumed = ""  # folder of the checkpoint

    def on_save(self, settings: Any, state: Any, *_: Any, **__: Any) -> None:
        folder = Path(settings.output_dir, f"checkpoint-{state.global_step}")
        torch.save(self._state.state_dict(), self._residuals(folder))

    def on_epoch_begin(self, settings: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
        train_dataloader.sampler.set_epoch(round(state.epoch))

    @staticmethod
    def _residuals(folder: str | Path) -> Path:
        return Path(folder, f"residuals-{dist.get_rank()}.pt")


def trainer_of(chosen: argparse.Namespace, folder: str) -> tuple[Trainer, Registering]:
    """Returns a Trainer of a new model and its callback."""
    model, registering = Network(chosen.lora), Registering(chosen)
    optimizer = torch.optim.SGD(trained(model), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    registering.trainer = ShardedTrainer(
        model,
        arguments(folder, chosen),
        train_dataset=samples(),
        eval_dataset=samples(),
        optimizers=(optimizer, schedule),
        callbacks=[registering],
    )
    return registering.trainer, registering


def train(chosen: argparse.Namespace) -> None:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = str(folders[0])
    trainer, registering = trainer_of(chosen, folder)
    assert trainer.args.world_size == dist.get_world_size()
    if chosen.evaluate_first:
        trainer.evaluate()
    trainer.train()
    if chosen.resume:
        dist.barrier()
        checkpoint = min(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        trainer, registering = trainer_of(chosen, folder)
        registering.resumed = str(checkpoint)
        trainer.train(resume_from_checkpoint=str(checkpoint))
    dist.barrier()
    report(dist.get_rank(), trainer.model.net, trainer.state.global_step)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


if __name__ == "__main__":
    in_process_group(train, options(__doc__))
