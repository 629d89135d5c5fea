"""What a task is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from examples import data


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of words and the words that follow each, indexed by whole batches.

    Args:
        words: Word numbers, int of shape (n,).
        length: Words of a stretch.
        stride: From the start of one stretch to the start of the next.
    """

    def __init__(self, words: Tensor, length: int, stride: int) -> None:
        self._stretches = words.unfold(0, length + 1, stride)

    def __len__(self) -> int:
        return len(self._stretches)

    def __getitem__(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Words and their successors, both int64 of shape (batch, length)."""
        stretches = self._stretches[torch.as_tensor(batch)].long()
        return stretches[:, :-1], stretches[:, 1:]


Samples: TypeAlias = Windows | data.Images


@dataclass(frozen=True)
class Task:
    """A model, its data and the settings at which dense training does well.

    Attributes:
        name: Its name.
        metric: ``accuracy`` or ``perplexity``, both of the test part.
        build: Makes a model from torch's global generator.
        load: Gives the training and the test part, from a folder where files are needed. Indexed by a whole batch,
            each gives inputs and labels.
        batch: Samples of a rank and step.
        lr: Largest learning rate of SGD with momentum.
        plain_lr: Of SGD without.
        adam_lr: Of Adam.
        weight_decay: Of all of them.
        evaluations: Points of the learning curve.
        bucket_bytes: Of the gradients. One bucket for most of a model: ranks that share cores wait long for each other.
    """

    name: str
    metric: str
    build: Callable[[], nn.Module]
    load: Callable[[Path], tuple[Samples, Samples]]
    batch: int
    lr: float
    plain_lr: float
    adam_lr: float = 1e-3
    weight_decay: float = 0.0
    evaluations: int = 5
    bucket_bytes: int = 8 * 2**20

    @property
    def rates(self) -> dict[str, float]:
        """Largest learning rate of each kind of optimizer that runs name."""
        return {"momentum": self.lr, "memory": self.lr, "sgd": self.plain_lr, "adam": self.adam_lr}
