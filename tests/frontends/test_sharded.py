"""The sparse reduce-scatter of fully sharded models: FSDP2's results at density 1, and nothing lost below it."""

from __future__ import annotations

import pytest
import torch
from front_ends import SHAPES, Model
from laws import everywhere
from sharding import full, shard, uneven, uneven_loss
from torch.distributed.device_mesh import init_device_mesh
from training import agree, loss_of, mlp, near, settings, sgd, train

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))
SPARSE = hvs.Compression.topka(**settings())


@pytest.fixture(scope="module")
def shards(group, comm):
    """A mesh of all ranks, each of which holds a shard."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()  # has meshes that are equal, but of a process group that is gone
    return init_device_mesh("cpu", (comm.Get_size(),))


def scattered(model, compression, optimizer=None, **more):
    return hvs.fsdp.sparse_reduce_scatter(model, compression, optimizer, **more)


def trained(comm, mesh, compression=None, steps=4, make=mlp, optimizer=sgd, loss=loss_of, **of_fsdp):
    """Parameters after some steps of sparse exchange, or of torch's own FSDP2 without a compression."""
    model = shard(make(), mesh, **of_fsdp)
    stepping = optimizer(model)
    exchange = None if compression is None else scattered(model, compression, stepping)
    train(stepping, model, comm.Get_rank(), range(steps), loss)
    return full(model), exchange


OPTIMIZERS = {
    "SGD": lambda model: sgd(model, weight_decay=0.01),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
}


@pytest.mark.parametrize("dense_below", [0, 50, 10000])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("make", "loss"), [(mlp, loss_of), (uneven, uneven_loss)], ids=["even", "uneven"])
def test_density_1_equals_fsdp(comm, shards, make, loss, optimizer, dense_below):
    compression = hvs.Compression.topka(density=1.0, dense_below=dense_below)
    how = {"make": make, "optimizer": OPTIMIZERS[optimizer], "loss": loss}
    expected, _ = trained(comm, shards, **how)
    ours, _ = trained(comm, shards, compression, **how)
    assert everywhere(comm, near(ours, expected))
    assert agree(comm, ours)


def gradients(rank, step, shapes=SHAPES):
    """Gradients that are eighths of small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randint(-64, 64, shape, generator=generator) / 8 for name, shape in shapes.items()}


def held(exchange, shapes=SHAPES):
    """Residual of this rank by parameter."""
    state = exchange.state_dict()
    found = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for bucket in state["buckets"]:
        for name, (place, width) in state["layout"].get(bucket["parameters"][0], {}).items():
            target = found[name.partition(".")[0]]
            rows = bucket["memory"]["residual"].view(state["shards"], -1)[:, place : place + width]
            target.copy_(rows.flatten()[: target.numel()].view(target.shape))
    return found


def summed(comm, tensors):
    return {name: torch.from_numpy(comm.allreduce(tensor.numpy())) for name, tensor in tensors.items()}


RULES = ["topka", "oktopk", "gaussiank", "randomk", "randomblock", "stable", "topka:wire=float16", "topka:wire=log4"]


@pytest.mark.parametrize("spec", RULES)
def test_gradients_are_in_shards_or_residuals(comm, shards, spec):
    ranks, steps = comm.Get_size(), 40
    if ranks == 1:
        return
    model = shard(Model(), shards)
    text = f"{spec}{',' if ':' in spec else ':'}density=0.05,dense_below=100"
    exchange = scattered(model, hvs.parse(text))
    owed = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(steps):
        model.zero_grad()
        mine = gradients(comm.Get_rank(), step)
        model(mine).backward()
        for name, total in summed(comm, mine).items():
            owed[name] += total - ranks * getattr(model, name).weight.grad.full_tensor()
        if step % 20 == 19:
            residuals = summed(comm, held(exchange))
            assert everywhere(comm, near(residuals.values(), owed.values(), 1e-3))
    assert everywhere(comm, any(float(one.abs().max()) > 1 for one in residuals.values()))
