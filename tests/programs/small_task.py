"""A task that is learned in a second, for the programs that hand the training to somebody else's trainer."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, FEATURES = 192, 16


def options(description: str | None) -> argparse.Namespace:
    """The arguments of all these programs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--compression", default="none", help="text of hvs.parse; none: a dense exchange")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes per step")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the exchanged gradient; 0: any")
    return parser.parse_args()


def data() -> TensorDataset:
    """The same samples on every rank."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    weights = torch.randn(FEATURES, 1, generator=generator)
    return TensorDataset(inputs, torch.tanh(inputs @ weights))


def network() -> nn.Module:
    """The same parameters on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))


def report(rank: int, net: nn.Module, steps: int) -> None:
    """Prints a digest of this rank's parameters, its loss on all samples and its number of steps, as a line of JSON."""
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    inputs, targets = data().tensors
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(inputs), targets).item()
    line = json.dumps({"rank": rank, "digest": digest.hexdigest(), "loss": loss, "steps": steps})
    sys.stdout.write(f"\n{line}\n")
