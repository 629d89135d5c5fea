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
from torch.nn.parallel import DistributedDataParallel
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


def network() -> nn.Module:
    """The same parameters on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))


def report(rank: int, net: nn.Module, steps: int) -> None:
    """Prints a digest of this rank's parameters, its loss on all samples and its number of steps, as a line of JSON."""
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    inputs, targets = data().tensors
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(inputs), targets).item()
    line = json.dumps({"rank": rank, "digest": digest.hexdigest(), "loss": loss, "steps": steps})
    sys.stdout.write(f"\n{line}\n")


def register(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> None:
    """Registers the hook; without a compression, the exchange is DDP's own."""
    if options.compression != "none":
        state = hvs.ddp.SparseState(compression=hvs.parse(options.compression), optimizer=optimizer)
        model.register_comm_hook(state, hvs.ddp.sparse_hook)


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
