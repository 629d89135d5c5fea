"""Small models and a comparison of our optimizer with Horovod's own, for the tests of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from laws import everywhere, same_bits
from torch import nn

import horovod_sparse as hvs


def dense_sparse(**settings: Any) -> hvs.Sparse:
    """Everything travels, by the sparse path: several buckets, no parameter left to Horovod."""
    return hvs.Compression.topka(**{"density": 1.0, "dense_below": 0, "bucket_bytes": 1200, **settings})


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Three layers, the same on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


class Branches(nn.Module):
    """Two branches that do not depend on each other, run in either order, or one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.left = nn.Linear(12, 10)
        self.right = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        return sum(getattr(self, name)(x).tanh().square().sum() for name in order.split())


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 12, generator=generator)
    return x.to(dtype), torch.randn(8, 4, generator=generator).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Mean squared error on this rank's batch."""
    x, y = batch(rank, step, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x), y)


def own_gradients(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    """This rank's gradients before any exchange; no hook runs.

    After ``backward()`` they can no longer be read off ``p.grad``: the exchange may have written there already.
    """
    return list(torch.autograd.grad(loss_of(model, rank, step), list(model.parameters())))


# A scenario trains with the optimizers that it wraps by its first argument and gives the parameters it ends with.
Scenario = Callable[[Callable[..., Any], int], list[torch.Tensor]]


def assert_parity(hvd: Any, comm: Any, scenario: Scenario, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Our optimizer at density 1 ends where Horovod's does, and with the same bits on every rank.

    Args:
        hvd: Horovod.
        comm: The ranks that take part.
        scenario: What to run with either.
        rtol: Tolerance of rounding: the sums are formed in another order.
        atol: The same, absolute.
    """
    rank = comm.Get_rank()
    stock = scenario(hvd.DistributedOptimizer, rank)
    ours = scenario(partial(hvs.DistributedOptimizer, compression=dense_sparse()), rank)
    for expected, parameter in zip(stock, ours, strict=True):
        difference = (expected - parameter).abs().max().item()
        close = torch.allclose(expected, parameter, rtol=rtol, atol=atol)
        assert everywhere(comm, close), f"rank {rank}: differs from Horovod by {difference}"
        assert same_bits(comm, parameter.float().numpy())


def snapshot(*models: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters."""
    return [p.detach().clone() for model in models for p in model.parameters()]
