"""Training with both front ends, and with torch's optimizer on the mean gradient for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, sgd, snapshot, wrap

import horovod_sparse as hvs

STEPS = 50
# Small parameters are exchanged dense; from the others, everything is selected.
WHOLE = {"density": 1.0, "dense_below": 100, "bucket_bytes": 1200}


def constant(step: int) -> float:
    return 0.02


def falling(step: int) -> float:
    """Return a learning rate with a warm-up from 0 and two sudden drops."""
    return 0.004 * step if step < 5 else 0.02 / (1, 10, 3)[step // 20 % 3]


def no_change(optimizer: Any, step: int) -> None:
    """Change nothing but the learning rate."""


def train_plain(
    comm: Any,
    model: nn.Module,
    optimizer: Any,
    rate: Callable[[int], float] = constant,
    loss: Callable[..., torch.Tensor] = loss_of,
    steps: int = STEPS,
    change: Callable[[Any, int], None] = no_change,
) -> None:
    """Train with torch's optimizer on the mean gradient."""
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        change(optimizer, step)
        mine = torch.autograd.grad(loss(model, comm.Get_rank(), step), list(model.parameters()))
        for p, gradient in zip(model.parameters(), mine, strict=True):
            p.grad = torch.from_numpy(comm.allreduce(gradient.numpy())) / comm.Get_size()
        optimizer.step()


def train_through(
    comm: Any,
    replica: nn.Module,
    optimizer: Any,
    rate: Callable[[int], float] = constant,
    loss: Callable[..., torch.Tensor] = loss_of,
    steps: int = STEPS,
    change: Callable[[Any, int], None] = no_change,
) -> None:
    """Train like ``train_plain``, but through a front end."""
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        change(optimizer, step)
        optimizer.zero_grad()
        loss(replica, comm.Get_rank(), step).backward()
        optimizer.step()


def plain(
    comm: Any, model: nn.Module, rate: Any = constant, loss: Any = loss_of, steps: int = STEPS, **settings: Any
) -> list[torch.Tensor]:
    """Return the final parameters of torch's SGD with momentum 0.9."""
    train_plain(comm, model, sgd(model, lr=0.0, **settings), rate, loss, steps)
    return snapshot(model)


def through_horovod(model: nn.Module, compression: Any, optimizer: Any, **more: Any) -> tuple[nn.Module, Any]:
    return model, wrap(model, compression, optimizer, **more)


def through_ddp(model: nn.Module, compression: Any, optimizer: Any, **more: Any) -> tuple[nn.Module, Any]:
    replica = DistributedDataParallel(model)
    replica.register_comm_hook(hvs.ddp.SparseState(compression, optimizer, **more), hvs.ddp.sparse_hook)
    return replica, optimizer


FRONT_ENDS = {"Horovod": through_horovod, "DDP": through_ddp}


def near(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], tolerance: float = 1e-9) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)
