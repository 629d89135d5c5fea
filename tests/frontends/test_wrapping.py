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


class Centralized(torch.optim.SGD):
    """Has an option that is no key of the param groups, and an argument without a default."""

    def __init__(self, params, lr, rank, centralize=True):
        super().__init__(params, lr)
        self.rank, self.centralize, self.made = rank, centralize, self

    def tell(self):
        return self.rank


def test_attributes(hvd, group, comm, front_end):
    def make(parameters):
        optimizer = Centralized(parameters, 0.1, rank=8, centralize=False)
        optimizer.note = ["set by hand"]
        optimizer.defaults["other"] = 3
        optimizer.param_groups[0]["layer"] = "all"
        optimizer.told = types.MethodType(lambda self: self.rank, optimizer)
        made.append(optimizer)
        return optimizer

    made = []
    _, optimizer, _ = start(front_end, mlp(), make, SPARSE)
    optimizer.rank = 9
    assert (optimizer.centralize, optimizer.tell(), optimizer.told(), made[0].told()) == (False, 9, 9, 8)
    assert optimizer.note is made[0].note
    assert optimizer.defaults["other"] == 3
    assert optimizer.param_groups[0]["layer"] == "all"
    assert optimizer.param_groups[0] is made[0].param_groups[0]


def test_hooks(hvd, group, comm, front_end):
    called = []

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, 0.1)
        for name in HOOKS:
            getattr(optimizer, f"register_{name}_hook")(lambda *_, name=name: called.append(name))
        made.append(optimizer)
        return optimizer

    made = []
    model = mlp()
    _, optimizer, _ = start(front_end, model, make, SPARSE)
    train(optimizer, model, comm.Get_rank(), [0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == HOOKS
    assert not made[0]._optimizer_state_dict_pre_hooks.keys() - optimizer._optimizer_state_dict_pre_hooks.keys()
    assert len(made[0]._optimizer_step_post_hooks) == 1  # not those of the front end


HOOKS = ["step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]


def test_a_scheduler_of_the_plain_optimizer_sets_the_rate(hvd, group, comm, front_end, recwarn):
    schedulers = []

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, 0.5)
        schedulers.append(ExponentialLR(optimizer, 0.1))
        return optimizer

    model = mlp()
    _, optimizer, _ = start(front_end, model, make, SPARSE)
    train(optimizer, model, comm.Get_rank(), [0])
    schedulers[0].step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert not [one for one in recwarn if "was replaced on the instance" in str(one.message)]


def test_a_step_that_was_replaced_on_the_instance_is_reported(hvd, group, comm, front_end):
    def make(parameters):
        optimizer = torch.optim.SGD(parameters, 0.5)
        optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)
        return optimizer

    model = mlp()
    before = snapshot(model)
    with pytest.warns(UserWarning, match=r"step\(\) of this SGD was replaced on the instance"):
        _, optimizer, _ = start(front_end, model, make, SPARSE)
    train(optimizer, model, comm.Get_rank(), [0])
    assert everywhere(comm, not same(snapshot(model), before))


class Averaging(torch.optim.SGD):
    def statistics(self):
        return {}


def test_a_method_that_would_be_hidden_is_refused(hvd, group, comm, front_end):
    with pytest.raises(ValueError, match=r"rank \d: Averaging.statistics would be hidden.*: rename it in Averaging"):
        start(front_end, mlp(), lambda parameters: Averaging(parameters, 0.1), SPARSE)


def test_an_attribute_that_would_be_hidden_is_refused(hvd, group, comm, front_end):
    def make(parameters):
        optimizer = torch.optim.SGD(parameters, 0.1)
        optimizer.traffic = 3
        return optimizer

    with pytest.raises(ValueError, match=r"rank \d: SGD.traffic would be hidden"):
        start(front_end, mlp(), make, SPARSE)


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
        _, optimizer, _ = start(front_end, model, make, SPARSE)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, comm.Get_rank(), step).backward()
            optimizer.step()
        results.append(snapshot(model))
    assert everywhere(comm, same(*results))
