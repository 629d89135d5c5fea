"""The small task for Hugging Face's Trainer."""

from __future__ import annotations

import argparse

import torch
from small_task import data, network
from torch import nn
from transformers import TrainingArguments


class Network(nn.Module):
    """The network as the Trainer wants it: it returns the loss."""

    def __init__(self, lora: bool = False) -> None:
        super().__init__()
        self.net = network(lora)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.net(inputs)
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


def samples() -> list[dict[str, torch.Tensor]]:
    """The same samples on every rank."""
    return [{"inputs": inputs, "labels": labels} for inputs, labels in zip(*data().tensors, strict=True)]


def arguments(folder: str, options: argparse.Namespace) -> TrainingArguments:
    """What the options ask for, and nothing logged."""
    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=8,
        num_train_epochs=options.epochs,
        gradient_accumulation_steps=options.accumulate,
        max_grad_norm=options.clip,
        save_strategy="epoch" if options.folder else "no",
        eval_on_start=options.eval_on_start,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
