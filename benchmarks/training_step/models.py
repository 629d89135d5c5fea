"""Models of the benchmark, each with one batch of random data on which every step trains."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the conventional name

from examples.models import MODELS as IMAGE_MODELS
from examples.models import build

LANGUAGE_MODELS = ("gpt2", "gpt2-medium", "tiny")  # of benchmarks.gpt2
MODELS = (*IMAGE_MODELS, *LANGUAGE_MODELS)


class Workload:
    """A model with its batch.

    Args:
        name: Name in ``MODELS``.
        batch: Samples per step: images of 3 x 32 x 32, or sequences.
        length: Most tokens per sequence.
        device: Device of the model.

    Attributes:
        model: The model, float32.
    """

    def __init__(self, name: str, batch: int, length: int, device: torch.device) -> None:
        self._device = device
        self._mixed = name in LANGUAGE_MODELS
        self.model: nn.Module
        make = self._language if self._mixed else self._images
        self._loss = make(name, batch, length)

    def _images(self, name: str, batch: int, length: int) -> Callable[[], Tensor]:
        del length
        with self._device:  # initial values take seconds on the CPU
            self.model = build(name, 3, 32, 10)
        images = torch.randn(batch, 3, 32, 32, device=self._device)
        labels = torch.randint(10, (batch,), device=self._device)
        return lambda: F.cross_entropy(self.model(images), labels)

    def _language(self, name: str, batch: int, length: int) -> Callable[[], Tensor]:
        with self._device:
            model = importlib.import_module("benchmarks.gpt2.model").build(name)
        size = (batch, min(length, model.shape.context) + 1)
        tokens = torch.randint(model.shape.vocabulary, size, device=self._device)
        self.model = model
        return lambda: model(tokens[:, :-1], tokens[:, 1:])

    def _autocast(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass: language models compute in bfloat16."""
        return torch.autocast(self._device.type, torch.bfloat16) if self._mixed else nullcontext()

    def loss(self) -> Tensor:
        """Run the forward pass and return the loss."""
        with self._autocast():
            return self._loss()
