"""Wrapped optimizers keep what a script has set on the optimizer: attributes, hooks, keys of param groups."""

from __future__ import annotations

import types

import pytest
import torch
from front_ends import start
from laws import everywhere
from states import same
from torch.optim.lr_scheduler import ExponentialLR
from training import loss_of, mlp, settings, snapshot, train

import horovod_sparse as hvs

pytestmark = [pytest.mark.mpi, pytest.mark.parametrize("front_end", ["Horovod", "local"])]

SPARSE = hvs.Compression.topka(**settings())


def test_a_scheduler_of_the_plain_optimizer_sets_the_rate(hvd, group, comm, front_end, recwarn):
    schedulers = []

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, 0.5)
        schedulers.append(ExponentialLR(optimizer, 0.1))
        return optimizer

    model = mlp()
    optimizer = start(front_end, model, make, SPARSE).optimizer
    train(optimizer, model, comm.Get_rank(), [0])
    schedulers[0].step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert not [one for one in recwarn if "the wrapped optimizer has its own" in str(one.message)]


def test_a_step_that_was_replaced_on_the_instance_is_reported(hvd, group, comm, front_end):
    def make(parameters):
        optimizer = torch.optim.SGD(parameters, 0.5)
        optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)
        return optimizer

    model = mlp()
    before = snapshot(model)
    with pytest.warns(UserWarning, match="the wrapped optimizer has its own step, hiding what SGD has"):
        optimizer = start(front_end, model, make, SPARSE).optimizer
    train(optimizer, model, comm.Get_rank(), [0])
    assert everywhere(comm, not same(snapshot(model), before))


class Averaging(torch.optim.SGD):
    traffic = None

    def statistics(self):
        return {}


def test_what_the_front_end_hides_is_reported(hvd, group, comm, front_end):
    def make(parameters):
        optimizer = Averaging(parameters, 0.1)
        optimizer._exchange = "an attribute"
        optimizer.set_epoch = types.MethodType(lambda self, epoch: None, optimizer)
        return optimizer

    model = mlp()
    hidden = "_exchange, set_epoch, statistics, traffic"
    with pytest.warns(UserWarning, match=f"the wrapped optimizer has its own {hidden}, hiding what Averaging"):
        optimizer = start(front_end, model, make, SPARSE).optimizer
    optimizer.set_epoch(3)
    train(optimizer, model, comm.Get_rank(), [0])
    assert everywhere(comm, bool(optimizer.statistics()) == (comm.Get_size() > 1))
    assert optimizer.traffic is not None


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "LBFGS", "ASGD", "Adafactor"])
def test_nothing_of_an_optimizer_of_torch_is_hidden(hvd, group, comm, front_end, name, recwarn):
    start(front_end, mlp(), getattr(torch.optim, name), SPARSE)
    assert not [one for one in recwarn if "the wrapped optimizer has its own" in str(one.message)]


def test_what_is_added_later_is_not_added_to_the_plain_optimizer(hvd, group, comm, front_end):
    made = []

    def make(parameters):
        made.append(torch.optim.SGD(parameters, 0.1, momentum=0.9))
        return made[0]

    model = mlp()
    optimizer = start(front_end, model, make, hvs.Compression.topka(memory="residual", **settings())).optimizer
    train(optimizer, model, comm.Get_rank(), [0])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3), requires_grad=False)]})
    assert not made[0].state
    assert len(made[0].param_groups) == 1


def test_state_of_steps_before_is_kept(hvd, group, comm, front_end):
    momentum = []

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        train(optimizer, model, 0, [0])
        momentum.extend(state["momentum_buffer"] for state in optimizer.state.values())
        return optimizer

    model = mlp()
    optimizer = start(front_end, model, make, hvs.Compression.topka(memory="residual", **settings())).optimizer
    kept = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all(one is other for one, other in zip(kept, momentum, strict=True))


def test_an_optimizer_that_holds_another_one(hvd, group, comm, front_end):
    """As SAM, Lookahead and others do; the inner one takes the step with the exchanged gradients."""

    class Holding(torch.optim.Optimizer):
        def __init__(self, inner, speed):
            super().__init__(inner.param_groups, {"speed": speed})
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()

    model, results = mlp(), []
    for make in (lambda ps: torch.optim.SGD(ps, 0.1), lambda ps: Holding(torch.optim.SGD(ps, 0.1), 2)):
        model = mlp()
        optimizer = start(front_end, model, make, SPARSE).optimizer
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, comm.Get_rank(), step).backward()
            optimizer.step()
        results.append(snapshot(model))
    assert everywhere(comm, same(*results))
