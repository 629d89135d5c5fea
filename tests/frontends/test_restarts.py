"""Learning rates that fall near 0 and rise again: sparse training stays near dense training in every front end."""

from __future__ import annotations

import pytest
import torch
from laws import everywhere
from sharding import exchanged, full, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, OneCycleLR
from training import loss_of, mlp, sgd, wrap

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

STEPS = 90
SCHEDULERS = {
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, STEPS // 3),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 1e-4, 0.1, STEPS // 6, cycle_momentum=False),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, STEPS),
}
OPTIMIZERS = {
    "heavy ball": {},
    "Nesterov": {"nesterov": True, "weight_decay": 1e-3},
    "dampening": {"dampening": 0.5},
    "no momentum": {"momentum": 0},
}
SPECS = ["topka", "oktopk:keep=4", "recommended:collective=topka"]


def horovod(comm, model, compression, optimizer):
    return model, wrap(model, compression, optimizer(model))


def ddp(comm, model, compression, optimizer):
    replica, stepping = DistributedDataParallel(model), optimizer(model)
    replica.register_comm_hook(hvs.ddp.SparseState(compression, stepping), hvs.ddp.sparse_hook)
    return replica, stepping


def fsdp(comm, model, compression, optimizer):
    mesh = init_device_mesh("cpu", (comm.Get_size(), 1), mesh_dim_names=("replicate", "shard"))
    sharded = shard(model, mesh["shard"])
    stepping = optimizer(sharded)
    exchanged(sharded, mesh, compression, stepping)
    return sharded, stepping


def norm(comm, front_end, compression, schedule, optimizer):
    """Return the norm of the parameters after training."""
    model, stepping = front_end(comm, mlp(), compression, lambda model: sgd(model, **optimizer))
    scheduler = SCHEDULERS[schedule](stepping)
    for step in range(STEPS):
        stepping.zero_grad()
        loss_of(model, comm.Get_rank(), step).backward()
        stepping.step()
        scheduler.step()
    parameters = full(model) if front_end is fsdp else list(model.parameters())
    return torch.cat([p.detach().flatten() for p in parameters]).norm().item()


# Each front end, and then what all of them share.
CASES = [
    *((front_end, SPECS[0], "restarts", "heavy ball") for front_end in (horovod, ddp, fsdp)),
    *(
        pytest.param(horovod, spec, schedule, optimizer, marks=pytest.mark.full)
        for spec in SPECS
        for schedule in SCHEDULERS
        for optimizer in OPTIMIZERS
        if not (schedule == "one cycle" and optimizer == "no momentum")  # it sets the momentum
    ),
]


@pytest.mark.parametrize(("front_end", "spec", "schedule", "optimizer"), CASES)
def test_the_parameters_grow_no_further_than_in_dense_training(hvd, group, comm, front_end, spec, schedule, optimizer):
    density = f"{spec}{',' if ':' in spec else ':'}density="
    sparse, dense = (
        norm(comm, front_end, hvs.parse(f"{density}{one},dense_below=0"), schedule, OPTIMIZERS[optimizer])
        for one in (0.05, 1.0)
    )
    assert everywhere(comm, 0 < sparse <= 1.2 * dense), (sparse, dense)
