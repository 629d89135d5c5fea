"""Models whose gradients a sparse reduce-scatter exchanges, and what their exchanges hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from front_ends import SHAPES, Model
from laws import everywhere
from sharding import full, parts_of, shard
from training import loss_of, mlp, near, settings, sgd, train

import horovod_sparse as hvs

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))
SPARSE = hvs.Compression.topka(**settings())


def scattered(model: Any, compression: Any, optimizer: Any = None, **more: Any) -> Any:
    return hvs.fsdp.sparse_reduce_scatter(model, compression, optimizer, **more)


def trained(
    comm: Any,
    mesh: Any,
    compression: Any = None,
    steps: int = 4,
    make: Any = mlp,
    optimizer: Any = sgd,
    loss: Any = loss_of,
    **of_fsdp: Any,
) -> tuple[list[torch.Tensor], Any]:
    """Parameters after some steps of sparse exchange, or of torch's own FSDP2 without a compression; the exchange."""
    model = shard(make(), mesh, **of_fsdp)
    stepping = optimizer(model)
    exchange = None if compression is None else scattered(model, compression, stepping)
    train(stepping, model, comm.Get_rank(), range(steps), loss)
    return full(model), exchange


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Gradients of ``Model`` that are eighths of small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randint(-64, 64, shape, generator=generator) / 8 for name, shape in SHAPES.items()}


def held(exchange: Any) -> dict[str, torch.Tensor]:
    """Residual of this rank by layer of ``Model``."""
    found = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for key, flat in parts_of(exchange.state_dict()).items():
        target = found[key.partition(".")[0]]
        target.copy_(flat[: target.numel()].view(target.shape))
    return found


def summed(comm: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(comm.allreduce(tensor.numpy())) for name, tensor in tensors.items()}


class Given:
    """Training of ``Model`` with prescribed gradients; notes what is neither in a gradient nor in a residual."""

    def __init__(self, comm: Any, mesh: Any, spec: str, optimizer: Any = None, **more: Any) -> None:
        self.comm, self.ranks = comm, comm.Get_size()
        self.model = shard(Model(), mesh)
        self.optimizer = None if optimizer is None else optimizer(self.model)
        self.exchange = scattered(self.model, sparse(spec), self.optimizer, **more)
        self.owed = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def backward(self, step: int, used: tuple[str, ...] = tuple(SHAPES)) -> None:
        """Compute gradients of the layers that this rank uses."""
        mine = {name: one for name, one in gradients(self.comm.Get_rank(), step).items() if name in used}
        self.model(mine).backward()
        unused = {name: torch.zeros(shape) for name, shape in SHAPES.items() if name not in used}
        for name, total in summed(self.comm, dict(sorted({**mine, **unused}.items()))).items():
            self.owed[name] += total

    def collect(self) -> None:
        """Subtract the gradients from what is owed, and clear them."""
        for name in SHAPES:
            gradient = getattr(self.model, name).weight.grad
            if gradient is not None:
                self.owed[name] -= self.ranks * gradient.full_tensor()
        self.model.zero_grad()

    def conserved(self) -> bool:
        """Return whether the residuals are what is owed; a collective call."""
        residuals = summed(self.comm, held(self.exchange)) if self.ranks > 1 else self.owed
        return everywhere(self.comm, near(residuals.values(), self.owed.values(), 1e-3))


def sparse(spec: str) -> Any:
    density = "" if spec.startswith("gravac") else "density=0.05,"
    return hvs.parse(f"{spec}{',' if ':' in spec else ':'}{density}dense_below=100")


def some(comm: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether tensors are not zero, unless there is a single rank."""
    return everywhere(comm, comm.Get_size() == 1 or any(float(one.abs().max()) > 1 for one in tensors.values()))


def check_conservation(comm: Any, mesh: Any, spec: str, steps: int) -> Given:
    training = Given(comm, mesh, spec)
    for step in range(steps):
        training.backward(step)
        training.collect()
        if step % 20 == 9:
            assert training.conserved()
    assert training.conserved()
    return training
