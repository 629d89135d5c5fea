"""What a script changes after the first step, and the exchange cannot follow, is refused."""

from __future__ import annotations

import pytest
import torch
from front_ends import start
from laws import everywhere
from training import loss_of, mlp, settings, sgd, train, wrap

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

SPARSE = hvs.Compression.topka(**settings())


def stepped(comm, front_end, **more):
    """Return a training after one step."""
    started = start(front_end, mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), SPARSE, **more)
    step(comm, started)
    return started


def step(comm, started, number=0):
    started.optimizer.zero_grad()
    loss_of(started.model, comm.Get_rank(), number).backward()
    started.optimizer.step()


@pytest.mark.parametrize("scaled", [False, True])
def test_the_optimizer_of_a_ddp_state_stays_after_the_first_step(group, comm, scaled):
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    started = stepped(comm, "DDP", grad_scaler=scaler)
    state = started.exchange
    state.optimizer, state.process_group, state.grad_scaler = started.optimizer, None, scaler  # as they are
    for another in (sgd(mlp()), [started.optimizer, sgd(mlp())], None):
        with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: optimizer must be set before .*SparseState"):
            state.optimizer = another
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: process_group must be set before"):
        state.process_group = torch.distributed.group.WORLD
    step(comm, started, 1)
    assert state.optimizer is started.optimizer
    assert state.optimizers == (started.optimizer,)


def test_an_optimizer_cannot_be_added_to_those_of_a_state(group, comm):
    first = sgd(mlp())
    state = hvs.ddp.SparseState(SPARSE, [first], mlp().named_parameters())
    with pytest.raises(AttributeError):
        state.optimizer.append(sgd(mlp()))
    with pytest.raises(AttributeError):
        state.optimizers.append(sgd(mlp()))


def test_what_the_exchange_of_a_wrapped_optimizer_was_made_for_stays(hvd, comm):
    optimizer = stepped(comm, "Horovod").optimizer
    optimizer.op, optimizer.process_set = optimizer.op, optimizer.process_set  # as they are
    for name, other in (("op", hvd.Sum), ("process_set", None)):
        with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: {name} cannot be changed"):
            setattr(optimizer, name, other)
    assert everywhere(comm, optimizer.op == hvd.Average)


@pytest.mark.parametrize("no_pass", [False, True])
def test_a_parameter_of_a_wrapped_optimizer_cannot_move_into_another_group(hvd, comm, no_pass):
    """Its residual would follow the rate of the old one."""
    if comm.Get_size() == 1:
        return
    model = mlp()
    *others, last = model.parameters()
    groups = [{"params": [*others, last], "lr": 0.1}, {"params": [], "lr": 1.0}]
    optimizer = wrap(model, SPARSE, torch.optim.SGD(groups, momentum=0))
    train(optimizer, model, comm.Get_rank())
    optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].append(last)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=rf"rank {comm.Get_rank()}: .* moved into another of its param groups"):
        optimizer.step() if no_pass else loss_of(model, comm.Get_rank(), 0).backward()
