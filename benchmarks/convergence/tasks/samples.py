"""Definition of a task, and samples of text."""

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
    """Windows of words and the words that follow each word, indexed by a list of window numbers.

    Args:
        words: Word numbers, int of shape (n,).
        length: Words per window.
        stride: Distance between the starts of two windows.
    """

    def __init__(self, words: Tensor, length: int, stride: int) -> None:
        self._windows = words.unfold(0, length + 1, stride)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return words and their successors, both int64 of shape (batch, length)."""
        windows = self._windows[torch.as_tensor(batch)].long()
        return windows[:, :-1], windows[:, 1:]


class Part(Dataset[tuple[Tensor, Tensor]]):
    """Part of other samples, indexed by a list of numbers."""

    def __init__(self, samples: Samples, numbers: range) -> None:
        self._samples, self._numbers = samples, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return what the samples return."""
        return self._samples[[self._numbers[number] for number in batch]]


Samples: TypeAlias = Windows | data.Images | Part


def held_out(samples: Samples, most: int) -> tuple[Samples, Samples]:
    """Divide a training part: the first nine tenths to train on, and at most this number of the rest to evaluate."""
    first, count = len(samples) * 9 // 10, len(samples)
    return Part(samples, range(first)), Part(samples, range(first, count, max(1, (count - first) // most)))


@dataclass(frozen=True)
class Task:
    """Model, data and the settings at which dense training works well."""

    name: str
    metric: str  # accuracy or perplexity, both of the test part
    build: Callable[[], nn.Module]  # with torch's global generator
    # Returns the training and the test part; its argument is the folder of the files, if the task needs any. Indexed by
    # the sample numbers of a batch, each part returns inputs and labels.
    load: Callable[[Path], tuple[Samples, Samples]]
    batch: int  # samples per rank and step
    lr: float  # peak learning rate of SGD with momentum
    plain_lr: float  # peak learning rate of SGD without momentum
    adam_lr: float = 1e-3  # peak learning rate of Adam
    muon_lr: float = 0.02  # peak learning rate of Muon
    weight_decay: float = 0.0  # of all optimizers
    evaluations: int = 5  # points of the learning curve
    bucket_bytes: int = 8 * 2**20  # holds most of a model, as ranks that share cores wait long for each other

    @property
    def rates(self) -> dict[str, float]:
        """Peak learning rates by ``Run.optimizer``."""
        return {
            **dict.fromkeys(("momentum", "nesterov", "memory"), self.lr),
            "sgd": self.plain_lr,
            "adam": self.adam_lr,
            "muon": self.muon_lr,
        }
