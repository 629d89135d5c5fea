"""Small models, a training loop, and a comparison of our optimizer with Horovod's."""

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


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **settings})


def wrap(model: nn.Module, compression: Any = None, optimizer: Any = None, **arguments: Any) -> Any:
    """Wrap an optimizer, by default without momentum, at density 0.05 and with three buckets."""
    return hvs.DistributedOptimizer(
        optimizer or sgd(model, momentum=0),
        named_parameters=model.named_parameters(),
        compression=hvs.Compression.topka(**settings()) if compression is None else compression,
        **arguments,
    )


def wrap_local(
    model: nn.Module, compression: Any = None, optimizer: Any = None, local_steps: int = 4, **arguments: Any
) -> Any:
    """Wrap an optimizer in LocalOptimizer; by default without momentum."""
    return hvs.LocalOptimizer(
        optimizer or sgd(model, momentum=0),
        model.named_parameters(),
        local_steps,
        hvs.Compression.topka(**settings()) if compression is None else compression,
        **arguments,
    )


MEAN = hvs.OuterSGD(lr=1, momentum=0)
# Small parameters are exchanged dense; from the others, everything is selected.
WHOLE = {"density": 1.0, "dense_below": 100, "bucket_bytes": 1200}
# Computes the loss of a model for a rank and a step.
Loss = Callable[[Any, int, int], torch.Tensor]


def settings(**more: Any) -> dict[str, Any]:
    return {"density": 0.05, "dense_below": 0, "bucket_bytes": 1200, **more}


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of one step, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 12, generator=generator)
    return x.to(dtype), torch.randn(8, 4, generator=generator).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the mean squared error on this rank's batch."""
    x, y = batch(rank, step, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x), y)


def train(
    optimizer: Any, model: nn.Module, rank: int, steps: Iterable[int] = range(3), loss: Loss = loss_of
) -> list[torch.Tensor]:
    """Train for some steps; return the parameters."""
    for step in steps:
        closure_of(optimizer, model, rank, step, loss)()
        optimizer.step()
    return snapshot(model)


def closure_of(
    optimizer: Any, model: nn.Module, rank: int, step: int = 0, loss: Loss = loss_of
) -> Callable[[], torch.Tensor]:
    """Return a closure for ``optimizer.step``."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, rank, step)
        value.backward()
        return value

    return closure


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model of three layers, the same on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


class Given(nn.Module):
    """Model with prescribed gradients: loss = sum of parameter times gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(300, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(7, 11, dtype=dtype))

    def gradients(self, rank: int, step: int) -> list[torch.Tensor]:
        """Return gradients that are eighths of small integers, whose sums are exact on any device."""
        generator = torch.Generator().manual_seed(100 * rank + step)
        return [torch.randint(-64, 64, p.shape, generator=generator).to(p) / 8 for p in self.parameters()]

    def loss(self, rank: int, step: int) -> torch.Tensor:
        return sum((p * g).sum() for p, g in zip(self.parameters(), self.gradients(rank, step), strict=True))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        """Return the loss, for DDP."""
        return self.loss(rank, step)

    def total(self, rank: int, *steps: int) -> float:
        """Return the sum of the gradients of some steps."""
        return sum(gradient.double().sum().item() for step in steps for gradient in self.gradients(rank, step))

    def moved(self) -> float:
        """Return the sum of all updates so far."""
        return -sum(p.detach().double().sum().item() for p in self.parameters())


def owed(optimizer: Any) -> float:
    """Return the sum of the residuals of a wrapped optimizer or ``SparseState`` as an update; 0 without any."""
    buckets = getattr(optimizer, "exchange", optimizer).state_dict()["buckets"]
    memories = [(bucket["unit"], bucket["memory"]) for bucket in buckets if "memory" in bucket]
    return sum(unit * memory["residual"].double().sum().item() for unit, memory in memories)


def conserved(comm: Any, model: Given, optimizer: Any, given: float, tolerance: float = 1e-3) -> bool:
    """Return whether every gradient is in the parameters or in a residual, as an update; a collective call.

    ``given`` is the sum of this rank's gradients, each times its learning rate; the tolerance is absolute.
    """
    total = model.moved() + comm.allreduce(owed(optimizer))
    return everywhere(comm, abs(total - comm.allreduce(given) / comm.Get_size()) < tolerance)


def averages(model: nn.Module, comm: Any, step: int) -> list[torch.Tensor]:
    """Return the mean gradients of the parameters that are not frozen, in float32; no hook runs.

    After ``backward()``, ``p.grad`` no longer holds this rank's gradient: the exchange may have overwritten it already.
    """
    learning = [p for p in model.parameters() if p.requires_grad]
    mine = torch.autograd.grad(loss_of(model, comm.Get_rank(), step), learning)
    return means(comm, [one.float() for one in mine])


def means(comm: Any, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the means of tensors over all ranks."""
    return [torch.from_numpy(comm.allreduce(tensor.numpy()) / comm.Get_size()) for tensor in tensors]


def near(ones: Iterable[torch.Tensor], others: Iterable[torch.Tensor], tolerance: float | None = None) -> bool:
    """Return whether tensors are equal up to a tolerance, absolute and relative; by default 1e-6, in float64 1e-9."""
    for one, other in zip(ones, others, strict=True):
        limit = tolerance or (1e-9 if one.dtype == torch.float64 else 1e-6)
        if not torch.allclose(one, other, rtol=limit, atol=limit):
            return False
    return True


# A scenario wraps its optimizers with its first argument, trains, and returns the final parameters.
Scenario = Callable[[Callable[..., Any], int], list[torch.Tensor]]


def assert_parity(hvd: Any, comm: Any, scenario: Scenario, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Assert that our optimizer at density 1 matches Horovod's, up to the order of sums, and that all ranks agree."""
    rank, everything = comm.Get_rank(), hvs.Compression.topka(**settings(density=1.0))
    stock = scenario(hvd.DistributedOptimizer, rank)
    ours = scenario(partial(hvs.DistributedOptimizer, compression=everything), rank)
    pairs = zip(stock, ours, strict=True)
    close = [torch.allclose(expected, parameter, rtol=rtol, atol=atol) for expected, parameter in pairs]
    assert everywhere(comm, all(close)), f"rank {rank} differs from Horovod: {close}"
    assert agree(comm, ours)


def parity(scenario: Scenario) -> Callable[[Any, Any], None]:
    """Return a test of a scenario."""

    def test(hvd: Any, comm: Any) -> None:
        assert_parity(hvd, comm, scenario)

    return test


def agree(comm: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors have the same bits on all ranks."""
    return same_bits(comm, *(tensor.float().numpy() for tensor in tensors))


def snapshot(*models: nn.Module) -> list[torch.Tensor]:
    """Return copies of all parameters."""
    return [p.detach().clone() for model in models for p in model.parameters()]
