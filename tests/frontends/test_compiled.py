"""Training steps inside of torch.compile: the bits of uncompiled ones, or an error on every rank."""

from __future__ import annotations

import pytest
import torch
from front_ends import start
from laws import everywhere
from sharding import full
from states import same
from torch.distributed.fsdp import FSDPModule
from training import loss_of, mlp, settings, snapshot

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

MOMENTUM = hvs.Compression.recommended(collective="topka", **settings())
SPARSE = hvs.Compression.topka(**settings())


@pytest.fixture
def fresh_dynamo():
    """Clear what Dynamo has compiled, before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(comm, front_end, steps=3, compiled=""):
    factor = 0 if front_end == "local" else 0.9
    made = start(
        front_end,
        mlp(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=factor),
        SPARSE if front_end == "local" else MOMENTUM,
    )

    def backward(step):
        loss_of(made.model, comm.Get_rank(), step).backward()

    def stepping():
        made.optimizer.step()

    def compile_(function, name):
        return torch.compile(function, backend="eager", dynamic=False) if name in compiled else function

    backward, stepping = compile_(backward, "backward"), compile_(stepping, "step")
    for step in range(steps):
        made.optimizer.zero_grad()
        backward(step)
        stepping()
    return full(made.model) if isinstance(made.model, FSDPModule) else snapshot(made.model)


@pytest.mark.parametrize("front_end", ["Horovod", "local", "DDP", "FSDP"])
@pytest.mark.parametrize("compiled", ["backward", "step"])
def test_a_compiled_training_step_has_the_same_bits(hvd, group, comm, fresh_dynamo, front_end, compiled):
    expected = trained(comm, front_end)
    assert everywhere(comm, same(trained(comm, front_end, compiled=compiled), expected))


def test_ddps_reducer_in_python_is_refused_on_every_rank(group, comm):
    """DDP then passes gradient and parameter to its hooks."""
    made = start("DDP", mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), SPARSE)
    p = next(made.model.parameters())
    with pytest.raises(RuntimeError, match=rf"rank {comm.Get_rank()}: .*python_reducer.*leave it at its default"):
        hvs.ddp.sparse_hook(made.exchange, (torch.zeros_like(p), p))
