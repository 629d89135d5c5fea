"""Training with both front ends, and with torch's optimizer on the mean gradient for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Loss, loss_of, means, sgd, snapshot, train, wrap

import horovod_sparse as hvs

STEPS = 50
# Small parameters are exchanged dense; from the others, everything is selected.
WHOLE = {"density": 1.0, "dense_below": 100, "bucket_bytes": 1200}


def constant(step: int) -> float:
    return 0.02


def falling(step: int) -> float:
    """Return a learning rate with a warm-up from 0 and two sudden drops."""
    return 0.004 * step if step < 5 else 0.02 / (1, 10, 3)[step // 20 % 3]


def train_through(
    comm: Any,
    replica: nn.Module,
    optimizer: Any,
    rate: Callable[[int], float] = constant,
    loss: Loss = loss_of,
    steps: int = STEPS,
    change: Callable[[Any, int], Any] = lambda optimizer, step: None,
) -> None:
    """Train through a front end, with a learning rate and other changes of the optimizer's settings in each step."""
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        change(optimizer, step)
        train(optimizer, replica, comm.Get_rank(), [step], loss)


def train_plain(comm: Any, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
    """Train like ``train_through``, with torch's optimizer on the mean gradient."""

    def average(*_: Any) -> None:
        for p, mean in zip(model.parameters(), means(comm, [p.grad for p in model.parameters()]), strict=True):
            p.grad = mean

    hook = optimizer.register_step_pre_hook(average)
    train_through(comm, model, optimizer, **settings)
    hook.remove()


def plain(
    comm: Any, model: nn.Module, rate: Any = constant, loss: Loss = loss_of, steps: int = STEPS, **settings: Any
) -> list[torch.Tensor]:
    """Return the final parameters of torch's SGD with momentum 0.9."""
    train_plain(comm, model, sgd(model, lr=0.0, **settings), rate=rate, loss=loss, steps=steps)
    return snapshot(model)


def through_horovod(model: nn.Module, compression: Any, optimizer: Any, **more: Any) -> tuple[nn.Module, Any]:
    return model, wrap(model, compression, optimizer, **more)


def through_ddp(model: nn.Module, compression: Any, optimizer: Any, **more: Any) -> tuple[nn.Module, Any]:
    replica = DistributedDataParallel(model, find_unused_parameters=more.pop("find_unused_parameters", False))
    state = hvs.ddp.SparseState(compression, optimizer, model.named_parameters(), **more)
    replica.register_comm_hook(state, hvs.ddp.sparse_hook)
    return replica, optimizer


FRONT_ENDS = {"Horovod": through_horovod, "DDP": through_ddp}
