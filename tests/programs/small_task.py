"""A task that is learned in a second, for the programs that hand the training to somebody else's trainer.

``register`` and ``distribute`` make the exchange that the options ask for.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import horovod_sparse as hvs

SAMPLES, FEATURES = 192, 16


def options(description: str | None) -> argparse.Namespace:
    """The arguments of all these programs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--compression", default="none", help="text of hvs.parse; none: a dense exchange")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes per step")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the exchanged gradient; 0: any")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 4 only")
    parser.add_argument("--evaluate-first", action="store_true", help="evaluate before training (Trainer)")
    parser.add_argument("--eval-on-start", action="store_true", help="evaluate within train() (Trainer)")
    parser.add_argument("--folder", help="save here after each epoch (Trainer)")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint of the folder (Trainer)")
    return parser.parse_args()


def in_process_group(train: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Trains in torch's process group over Gloo, which exists before the model and after it.

    A model that outlives its group may hang when it goes: it then joins Gloo's threads and holds the GIL, while one of
    them waits for the GIL to free the last sum (torch 2.13).
    """
    hvs.ddp.init_process_group("gloo")
    train(options)
    gc.collect()  # trainers refer to the model in cycles
    dist.destroy_process_group()


def data() -> TensorDataset:
    """The same samples on every rank."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    weights = torch.randn(FEATURES, 1, generator=generator)
    return TensorDataset(inputs, torch.tanh(inputs @ weights))


class Adapted(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices (LoRA, arXiv 2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs) + self.up(self.down(inputs))
        return outputs


def network(lora: bool = False) -> nn.Module:
    """The same parameters on every rank; with ``lora``, adapters are all that is trained."""
    torch.manual_seed(1)
    first, last = nn.Linear(FEATURES, 64), nn.Linear(64, 1)
    return nn.Sequential(*((Adapted(first), nn.Tanh(), Adapted(last)) if lora else (first, nn.Tanh(), last)))


def trained(net: nn.Module) -> list[nn.Parameter]:
    """Parameters that an optimizer updates."""
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


def report(rank: int, net: nn.Module, steps: int) -> None:
    """Prints a digest of this rank's parameters, its loss on all samples and its number of steps, as a line of JSON."""
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    inputs, targets = data().tensors
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(inputs), targets).item()
    frozen = sum(p.detach().double().sum().item() for p in net.parameters() if not p.requires_grad)
    line = json.dumps({"rank": rank, "digest": digest.hexdigest(), "loss": loss, "steps": steps, "frozen": frozen})
    sys.stdout.write(f"\n{line}\n")


def register(model: Any, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> hvs.ddp.SparseState | None:
    """Registers the hook and returns its state; without a compression, the exchange is DDP's own."""
    if options.compression == "none":
        return None
    state = hvs.ddp.SparseState(hvs.parse(options.compression), optimizer, model.named_parameters())
    model.register_comm_hook(state, hvs.ddp.sparse_hook)
    return state


def distribute(optimizer: torch.optim.Optimizer, net: nn.Module, options: argparse.Namespace) -> Any:
    """Horovod's optimizer or ours, after rank 0's parameters have been sent to all."""
    import horovod.torch as hvd

    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    arguments = {"named_parameters": net.named_parameters(), "backward_passes_per_step": options.accumulate}
    if options.compression != "none":
        return hvs.DistributedOptimizer(optimizer, compression=hvs.parse(options.compression), **arguments)
    stock = hvd.DistributedOptimizer(optimizer, **arguments)
    step = type(stock).step

    def closure_first(optimizer: Any, closure: Any = None) -> Any:
        """Horovod's step(closure) exchanges before the closure has computed the gradients: this one does afterwards."""
        loss = None if closure is None else closure()
        step(optimizer)
        return loss

    stock.step = MethodType(closure_first, stock)
    return stock
