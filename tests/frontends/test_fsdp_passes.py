"""Backward passes of FSDP2 models, between replicas and fully sharded: where they begin and end, and what fails."""

from __future__ import annotations

import pytest
import torch
from front_ends import SHAPES, Model
from laws import everywhere
from scattered import gradients, scattered
from sharding import exchanged, full, shard
from states import same
from torch.distributed.fsdp import register_fsdp_forward_method
from training import sgd

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

RECOMMENDED = hvs.parse("recommended:collective=topka,density=0.05,dense_below=0,bucket_bytes=1200")
SPARSE = hvs.parse("topka:density=0.05,dense_below=0,bucket_bytes=1200")


class Opaque:
    """Output in which nobody finds the tensor."""

    def __init__(self, loss):
        self.loss = loss


class Named(Model):
    """Model with other ways to compute the loss."""

    def as_method(self, given):
        return super().forward(given)

    def forward(self, given, opaque=False):
        loss = super().forward(given)
        return Opaque(loss) if opaque else loss


class Training:
    """Training of a sharded model with one of the exchanges."""

    def __init__(self, comm, mesh, between, compression, model=Named, make=lambda model: [sgd(model)], **more):
        self.rank, replicas = comm.Get_rank(), between == "replicas"
        self.model = shard(model(), mesh["shard"] if replicas else mesh)
        register_fsdp_forward_method(self.model, "as_method")
        self.optimizers = make(self.model)
        given = (self.model, mesh, compression) if replicas else (self.model, compression)
        self.exchange = (exchanged if replicas else scattered)(*given, self.optimizers, **more)

    def backward(self, step, how="", used=tuple(SHAPES)):
        given = {name: one for name, one in gradients(self.rank, step).items() if name in used}
        if how == "method":
            loss = self.model.as_method(given)
        else:
            loss = self.model(given, opaque=True).loss if how == "opaque" else self.model(given)
        loss.backward()

    @property
    def optimizer(self):
        return self.optimizers[0]

    def take(self, step, **how):
        self.optimizer.zero_grad()
        self.backward(step, **how)
        self.optimizer.step()

    @property
    def steps(self):
        return self.exchange.statistics().get("total/steps")


@pytest.fixture(params=["replicas", "shards"])
def start(request, comm):
    """Function that begins a training."""
    mesh = request.getfixturevalue("mesh" if request.param == "replicas" else "shards")
    return lambda compression, **more: Training(comm, mesh, request.param, compression, **more)


@pytest.mark.parametrize("how", ["method", "opaque"])
def test_the_loss_of_a_registered_method_or_in_an_opaque_output(comm, start, how):
    """Also where gradients are added to exchanged ones, or dropped: what became of the last exchange is settled."""
    for undoable in (False, True):
        ends = []
        for called in (how, ""):
            training = start(SPARSE, undoable=undoable)
            for step in range(6):
                training.backward(step, called)
                if undoable and step % 2:
                    training.optimizer.zero_grad()
                elif undoable or step % 2:
                    training.optimizer.step()
                    training.optimizer.zero_grad()
            ends.append(full(training.model))
        assert everywhere(comm, same(*ends))


@pytest.mark.parametrize("first", ["third", "second"])
def test_a_backward_pass_after_one_that_failed_is_refused(comm, start, first):
    """Whatever layers it uses: gradients of the failed one are exchanged. So is a state, which would lack them."""
    training = start(SPARSE)
    training.take(0)

    def fail(*_):
        raise KeyError("of the script")

    handle = training.model.second.register_full_backward_hook(fail)  # after that of the third layer
    with pytest.raises(KeyError, match="of the script"):
        training.backward(1)
    handle.remove()
    training.model.reset_iter_state()
    training.optimizer.zero_grad()
    ranks = training.exchange._exchange.ranks
    if ranks > 1:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"rank {training.rank}: the last backward pass failed.*checkpoint"):
                training.backward(2, used=(first,))
            training.model.reset_iter_state()
        with pytest.raises(RuntimeError, match=f"rank {training.rank}: the last backward pass failed.*checkpoint"):
            training.exchange.state_dict()
    comm.Barrier()


@pytest.mark.parametrize("change", ["cleared", "scaled"])
def test_gradients_changed_on_one_rank_before_another_pass_are_refused_on_every_rank(comm, start, change):
    training = start(SPARSE)
    training.backward(0)
    if training.rank == 0:
        for layer in (training.model.first, training.model.second):
            layer.weight.grad = None if change == "cleared" else layer.weight.grad / 2
    if training.exchange._exchange.ranks > 1:
        with pytest.raises(
            RuntimeError, match=f"rank {training.rank}: (some gradients .*changed|another rank refuses)"
        ):
            training.backward(1)
    comm.Barrier()


def test_a_backward_pass_whose_forward_pass_was_before_the_call(comm, shards):
    """Its gradients are complete, and so is the step."""
    ends = []
    for before in (True, False):
        model = shard(Model(), shards)
        optimizer, given = sgd(model), gradients(comm.Get_rank(), 0)
        loss = model(given) if before else None
        exchange = scattered(model, SPARSE, optimizer)
        (loss if before else model(given)).backward()
        optimizer.step()
        ends.append(full(model))
        assert everywhere(comm, exchange.statistics().get("total/steps") in (None, 1))
    assert everywhere(comm, same(*ends))


def plain(layers):
    return torch.optim.SGD([layer.weight for layer in layers], 0.1)


def test_two_optimizers_that_drop_what_the_loss_of_the_other_leaves(comm, start):
    """As in the training of a GAN: every bit is as if these gradients had not been."""

    def make(model):
        return [plain([model.first]), plain([model.second, model.third])]

    ends = []
    for used in (tuple(SHAPES), ("first",)):
        training = start(SPARSE, undoable=True, make=make)
        first, rest = training.optimizers
        for step in range(0, 8, 2):
            first.zero_grad()
            training.backward(step, used=used)
            first.step()
            rest.zero_grad()
            training.backward(step + 1, used=("second", "third"))
            rest.step()
        ends.append(full(training.model))
    assert everywhere(comm, same(*ends))


def test_gradients_that_no_optimizer_clears_decide_nothing(comm, start):
    ends = []
    for clears in (True, False):
        training = start(SPARSE, undoable=True, make=lambda model: [plain([model.first, model.second])])
        for step in range(8):
            training.backward(step)
            if step % 2 == 0:
                training.optimizer.step()
            (training.model if clears else training.optimizer).zero_grad()
        ends.append(full(training.model))
    assert everywhere(comm, same(*ends))
