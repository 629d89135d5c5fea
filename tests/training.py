"""Small models, a training loop, and a comparison of our optimizer with Horovod's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from laws import everywhere, same_bits
from torch import nn

import horovod_sparse as hvs


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


def wrap(model: nn.Module, compression: Any = None, optimizer: Any = None, **arguments: Any) -> Any:
    """Our optimizer around one without momentum, by default with one entry in twenty and three buckets."""
    return hvs.DistributedOptimizer(
        optimizer or sgd(model, momentum=0),
        named_parameters=model.named_parameters(),
        compression=hvs.Compression.topka(**settings()) if compression is None else compression,
        **arguments,
    )


def wrap_local(
    model: nn.Module, compression: Any = None, optimizer: Any = None, local_steps: int = 4, **arguments: Any
) -> Any:
    """Local steps of an optimizer without momentum, whose mean is taken, unless other settings are given."""
    return hvs.LocalOptimizer(
        optimizer or sgd(model, momentum=0),
        model.named_parameters(),
        local_steps,
        hvs.Compression.topka(**settings()) if compression is None else compression,
        **{"outer": MEAN, **arguments},
    )


MEAN = hvs.OuterSGD(lr=1, momentum=0)


def settings(**more: Any) -> dict[str, Any]:
    return {"density": 0.05, "dense_below": 0, "bucket_bytes": 1200, **more}


def train(optimizer: Any, model: nn.Module, rank: int, steps: Iterable[int] = range(3)) -> list[torch.Tensor]:
    """The parameters after some steps."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return snapshot(model)


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


class Given(nn.Module):
    """A loss whose gradients are given: loss = sum of parameter times gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(300, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(7, 11, dtype=dtype))

    def gradients(self, rank: int, step: int) -> list[torch.Tensor]:
        """Eighths of small integers, whose sums are exact."""
        generator = torch.Generator().manual_seed(100 * rank + step)
        return [torch.randint(-64, 64, p.shape, generator=generator).to(p.dtype) / 8 for p in self.parameters()]

    def loss(self, rank: int, step: int) -> torch.Tensor:
        return sum((p * g).sum() for p, g in zip(self.parameters(), self.gradients(rank, step), strict=True))

    def total(self, rank: int, step: int) -> float:
        """The sum of the gradients."""
        return sum(gradient.double().sum().item() for gradient in self.gradients(rank, step))

    def moved(self) -> float:
        """The sum of all updates so far."""
        return -sum(p.detach().double().sum().item() for p in self.parameters())


def owed(optimizer: Any) -> float:
    """The sum of this rank's residuals, as an update of this rank's number of ranks."""
    buckets = optimizer.exchange.state_dict()["buckets"]
    return sum(bucket["unit"] * bucket["memory"]["residual"].double().sum().item() for bucket in buckets)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 12, generator=generator)
    return x.to(dtype), torch.randn(8, 4, generator=generator).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Mean squared error on this rank's batch."""
    x, y = batch(rank, step, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x), y)


def averages(model: nn.Module, comm: Any, step: int) -> list[torch.Tensor]:
    """The mean gradients of all ranks, in float32 at least; no hook runs.

    After ``backward()`` a rank's own can no longer be read off ``p.grad``: the exchange may have written there already.
    """
    mine = torch.autograd.grad(loss_of(model, comm.Get_rank(), step), list(model.parameters()))
    return [torch.from_numpy(comm.allreduce(one.float().numpy()) / comm.Get_size()) for one in mine]


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
    rank, everything = comm.Get_rank(), hvs.Compression.topka(**settings(density=1.0))
    stock = scenario(hvd.DistributedOptimizer, rank)
    ours = scenario(partial(hvs.DistributedOptimizer, compression=everything), rank)
    pairs = zip(stock, ours, strict=True)
    close = [torch.allclose(expected, parameter, rtol=rtol, atol=atol) for expected, parameter in pairs]
    assert everywhere(comm, all(close)), f"rank {rank} differs from Horovod: {close}"
    assert agree(comm, ours)


def parity(scenario: Scenario) -> Callable[[Any, Any], None]:
    """Makes a test of a scenario."""

    def test(hvd: Any, comm: Any) -> None:
        assert_parity(hvd, comm, scenario)

    return test


def agree(comm: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors have the same bits on all ranks."""
    return same_bits(comm, *(tensor.float().numpy() for tensor in tensors))


def snapshot(*models: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters."""
    return [p.detach().clone() for model in models for p in model.parameters()]
