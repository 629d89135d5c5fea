"""Trains with Hugging Face's Trainer, whose DDP exchange is its own or sparse: start it with mpirun or torchrun."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from small_task import Network, data, options, register, report
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import horovod_sparse as hvs


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

    def on_epoch_begin(self, arguments: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
        train_dataloader.sampler.set_epoch(round(state.epoch))


def main() -> None:
    chosen = options(__doc__)
    hvs.ddp.init_process_group("gloo")
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=8,
            num_train_epochs=chosen.epochs,
            gradient_accumulation_steps=chosen.accumulate,
            max_grad_norm=chosen.clip,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        samples = [{"inputs": inputs, "labels": labels} for inputs, labels in zip(*data().tensors, strict=True)]
        registering = Registering(chosen)
        trainer = ShardedTrainer(
            model, arguments, train_dataset=samples, optimizers=(optimizer, schedule), callbacks=[registering]
        )
        registering.trainer = trainer
        assert arguments.world_size == dist.get_world_size()
        trainer.train()
    report(dist.get_rank(), model.net, trainer.state.global_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
