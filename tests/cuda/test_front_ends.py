"""DDP and FSDP2 with parameters on the device: every gradient has the bits that it has on the host.

In the emulation, tensors of the CPU take the path of device tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import EmulatedDevice, emulated
from laws import everywhere
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import Given, agree, sgd

import horovod_sparse as hvs
from horovod_sparse.engine import layout
from horovod_sparse.frontends.ddp import bucket

pytestmark = pytest.mark.mpi

SPARSE = "density=0.05,dense_below=0"
SPECS = [
    f"topka:{SPARSE}",
    f"oktopk:{SPARSE},tau_partition=2,tau_threshold=2",
    f"recommended:{SPARSE},collective=topka",
    "dense",
]


def with_ddp(comm: Any, compression: Any, device: torch.device) -> tuple[Any, Callable[[], list[torch.Tensor]]]:
    """Return the model, and a function that returns copies of its gradients."""
    model = Given().to(device)
    replica = DistributedDataParallel(model)
    optimizer = sgd(model)
    state = hvs.ddp.SparseState(compression, optimizer, model.named_parameters())
    replica.register_comm_hook(state, hvs.ddp.sparse_hook)
    return (replica, optimizer), lambda: [p.grad.cpu().clone() for p in model.parameters()]


def with_fsdp(comm: Any, compression: Any, device: torch.device) -> tuple[Any, Callable[[], list[torch.Tensor]]]:
    """Return the model, with two shards per replica at 4 ranks, and a function as above."""
    shards = 2 if comm.Get_size() == 4 else 1
    mesh = init_device_mesh(device.type, (comm.Get_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Given().to(device), mesh=mesh["shard"])
    optimizer = sgd(model)
    hvs.fsdp.sparse_all_reduce(model, mesh.get_group("replicate"), compression, optimizer)
    return (model, optimizer), lambda: [p.grad.full_tensor().cpu().clone() for p in model.parameters()]


def gradients(comm: Any, front_end: Any, spec: str, device: torch.device) -> list[torch.Tensor]:
    """Return the gradients of six steps, which do not depend on the parameters."""
    (model, optimizer), found = front_end(comm, hvs.parse(spec), device)
    steps = []
    for step in range(6):
        optimizer.zero_grad()
        model(comm.Get_rank(), step).backward()
        steps += found()
        optimizer.step()
    return steps


def on_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if not emulated():
        return torch.device("cuda", torch.cuda.current_device())
    pretended = EmulatedDevice()
    for module in (layout, bucket):
        monkeypatch.setattr(module, "device_of", lambda _: pretended)
    return torch.device("cpu")


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("front_end", [with_ddp, with_fsdp])
def test_gradients_have_the_bits_of_those_on_the_host(
    group: None, comm: Any, monkeypatch: pytest.MonkeyPatch, front_end: Any, spec: str
) -> None:
    expected = gradients(comm, front_end, spec, torch.device("cpu"))
    ours = gradients(comm, front_end, spec, on_device(monkeypatch))
    assert everywhere(comm, all(map(torch.equal, ours, expected)))
    assert agree(comm, ours)
    assert everywhere(comm, any(bool(gradient.any()) for gradient in ours))
