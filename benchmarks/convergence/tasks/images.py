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
    """1,120,276 parameters: two convolutions that halve the picture, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 350),
        nn.ReLU(),
        nn.Linear(350, 10),
    )
