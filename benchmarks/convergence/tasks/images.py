"""Image tasks: scikit-learn's digits, which need no files, and Fashion-MNIST, whose files must be installed."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from benchmarks.convergence.tasks.samples import Samples
from examples import data


def read_digits(folder: Path) -> tuple[Samples, Samples]:
    """Return scikit-learn's digits, training and test part."""
    del folder
    split = data.load("digits")
    return split.train, split.test


def read_fashion(folder: Path) -> tuple[Samples, Samples]:
    """Return Fashion-MNIST from a folder of its IDX files, training and test part."""
    split = data.load(f"fashion-mnist:{folder}")
    return split.train, split.test


def fashion_cnn() -> nn.Module:
    """Return a CNN of two strided convolutions and two linear layers, with batch normalization as in published models.

    Batch normalization makes a layer's scale irrelevant. The model therefore tolerates the late and large updates of
    error feedback.
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
