"""Optimizers derived from those of torch: what is known of a class holds only for its own step()."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from front_ends import start
from laws import everywhere
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from training import agree, mlp, near, settings, snapshot, train

import horovod_sparse as hvs
from horovod_sparse.frontends.optimizers import torch_class
from horovod_sparse.frontends.units import known_unit

AFTERWARDS = hvs.Compression.topka(memory="residual", **settings())


class SignOfMomentum(torch.optim.AdamW):
    """Lion: the base class only sets up the param groups."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_((0.9 * average + 0.1 * p.grad).sign_(), alpha=group["lr"])
                average.lerp_(p.grad, 0.01)


class Centralized(torch.optim.SGD):
    """Changes gradients, and leaves the rest to its base class."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.sub_(p.grad.mean())
        return super().step(closure)


class Collecting(torch.optim.AdamW):
    def _init_group(self, *arguments):
        return super()._init_group(*arguments)


def counted(step):
    @functools.wraps(step)
    def counting(self, *arguments, **settings):
        return step(self, *arguments, **settings)

    return counting


class Wrapped(torch.optim.SGD):
    step = counted(torch.optim.SGD.step)


def made(cls, **more):
    return cls([nn.Parameter(torch.zeros(2, 2))], **{"lr": 0.1, **more})


@pytest.mark.parametrize("cls", [SignOfMomentum, Centralized, Collecting, Wrapped])
def test_a_class_with_its_own_step_is_unknown(cls):
    made(torch.optim.SGD), made(torch.optim.AdamW)  # torch then wraps their steps
    for kind in (cls, type("Derived", (cls,), {})):
        assert torch_class(made(kind)) is None
        assert known_unit(made(kind)) is None


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_a_class_without_its_own_step_is_that_of_torch(base):
    assert torch_class(made(type("Derived", (base,), {}))) is base  # perhaps before torch has wrapped the base's step
    assert torch_class(made(base)) is base
    assert torch_class(made(type("Derived", (type("Derived", (base,), {}),), {"other": 1}))) is base


def test_wrappers_of_torch_around_an_instance_change_nothing():
    scheduled, compiled, restored = made(torch.optim.SGD), made(torch.optim.SGD), made(torch.optim.SGD)
    ExponentialLR(scheduled, 0.9)
    compiled.step = torch.compile(compiled.step)
    restored.step = restored.step  # as Accelerate's, after a step with a scaler
    assert all(torch_class(one) is torch.optim.SGD for one in (scheduled, compiled, restored))


def test_an_instance_whose_step_was_replaced_is_unknown():
    one, other = made(torch.optim.SGD), made(torch.optim.SGD)
    one.step = types.MethodType(lambda self, closure=None: None, one)
    other.step = functools.wraps(other.step)(lambda closure=None: None)
    assert torch_class(one) is None
    assert torch_class(other) is None


def test_a_class_of_torch_whose_step_was_replaced_is_unknown(monkeypatch):
    monkeypatch.setattr(torch.optim.RMSprop, "step", lambda self, closure=None: None)
    assert torch_class(made(torch.optim.RMSprop)) is None


def trained(comm, front_end, make, compression):
    model = mlp()
    training = start(front_end, model, make, compression)
    scheduler = ExponentialLR(training.optimizer, 1.0)
    for step in range(12):
        train(training.optimizer, training.model, comm.Get_rank(), [step])
        scheduler.step()
    return snapshot(model)


@pytest.mark.mpi
def test_a_base_class_that_only_sets_up_param_groups_takes_no_momentum_over(group, comm):
    def make(parameters):
        return SignOfMomentum(parameters, 0.01)

    ours = trained(comm, "DDP", make, hvs.Compression.topka(memory="momentum", **settings()))
    assert agree(comm, ours)
    assert everywhere(comm, near(ours, trained(comm, "DDP", make, AFTERWARDS)))


class Calling(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.mpi
@pytest.mark.parametrize("front_end", ["Horovod", "DDP"])
def test_a_step_that_calls_its_base_class_gets_the_compressions_momentum_once(hvd, group, comm, front_end):
    """Torch calls the step hooks for both."""
    compression = hvs.Compression.topka(memory="momentum", momentum=0.9, **{**settings(), "dense_below": 100})
    made(torch.optim.SGD)
    expected, ours = (
        trained(comm, front_end, functools.partial(cls, lr=0.01), compression) for cls in (torch.optim.SGD, Calling)
    )
    assert everywhere(comm, near(ours, expected))
