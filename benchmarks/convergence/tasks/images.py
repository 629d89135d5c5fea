"""Tasks of images: scikit-learn's digits, which need nothing, and Fashion-MNIST, whose files have to be there."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from benchmarks.convergence.tasks.samples import Samples
from examples import data


def read_digits(folder: Path) -> tuple[Samples, Samples]:
    """scikit-learn's digits."""
    del folder
    split = data.load("digits")
    return split.train, split.test


def read_fashion(folder: Path) -> tuple[Samples, Samples]:
    """Fashion-MNIST from a folder of its IDX files."""
    split = data.load(f"fashion-mnist:{folder}")
    return split.train, split.test


def fashion_cnn() -> nn.Module:
    """Two convolutions that halve the picture, and two linear layers, with batch normalization as in published models.

    It makes a layer's scale irrelevant, and with it what error feedback delivers late and all at once bearable.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 350, bias=False),
        nn.BatchNorm1d(350),
        nn.ReLU(),
        nn.Linear(350, 10),
    )
