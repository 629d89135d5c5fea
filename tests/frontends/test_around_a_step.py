"""What scripts do around a step: right, or refused on every rank, or reported once."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from combinations import halved
from front_ends import start
from laws import everywhere
from sharding import full
from states import same
from torch import nn
from torch.distributed.fsdp import FSDPModule
from training import agree, batch, mlp, settings, snapshot

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

GRADIENTS = ("Horovod", "DDP", "FSDP")
TOPKA = hvs.Compression.topka(**settings())
RECOMMENDED = hvs.Compression.recommended(collective="topka", **settings())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Script:
    """A training script of one front end, or of stock DDP, which exchanges gradients in ``backward``."""

    def __init__(self, comm, front_end, compression, make=sgd, **more):
        self.rank, self.front_end, self.inner = comm.Get_rank(), front_end, mlp()
        made = start(front_end, self.inner, make, compression, **more)
        self.model, self.optimizer = made.model, made.optimizers[0]
        self.exchange = next(iter(made.exchanges), None)
        self.parameters = list(self.inner.parameters())

    def loss(self, step):
        x, y = batch(self.rank, step)
        return nn.functional.mse_loss(self.model(x), y)

    def backward(self, step, scale=1.0):
        (self.loss(step) * scale).backward()
        if self.front_end == "Horovod":
            self.optimizer.synchronize()

    def step(self):
        with self.optimizer.skip_synchronize() if self.front_end == "Horovod" else nullcontext():
            self.optimizer.step()

    def end(self):
        return full(self.inner) if isinstance(self.inner, FSDPModule) else snapshot(self.inner)


def probe(script, step):
    """Compute other gradients of the parameters, as a script that compares the losses of two tasks."""
    x, y = batch(script.rank, 100 + step)
    torch.autograd.grad(nn.functional.mse_loss(script.inner(x), y), script.parameters)


# FSDP2 has no gradients of its sharded parameters in autograd.
@pytest.mark.parametrize(
    ("front_end", "compression", "aside"),
    halved(
        ["Horovod", "DDP"],
        [TOPKA, RECOMMENDED, hvs.Compression.topka(memory="momentum", **settings())],
        [False, True],
    ),
)
def test_autograd_grad_between_backward_and_step_is_no_backward_pass(hvd, group, comm, front_end, compression, aside):
    """Even if the gradients were changed before, or are set aside: then no exchange counts as dropped."""
    ends = []
    for probes in (False, True):
        made = Script(comm, front_end, compression, undoable=aside)
        for step in range(4):
            made.optimizer.zero_grad()
            made.backward(step)
            nn.utils.clip_grad_norm_(made.parameters, 0.05)
            gradients = [p.grad for p in made.parameters]
            if aside:
                made.inner.zero_grad()
            if probes:
                probe(made, step)
            for p, gradient in zip(made.parameters, gradients, strict=True):
                p.grad = gradient
            made.step()
        ends.append(made.end())
    assert everywhere(comm, same(*ends))


@pytest.mark.parametrize(
    ("front_end", "compression", "between"),
    halved(
        GRADIENTS,
        [RECOMMENDED, hvs.Compression.topka(memory="momentum", momentum=0.9, **settings())],
        ["nothing", "zeros", "cleared", "filled", "autograd.grad"],
    ),
)
def test_momentum_in_gradients_counts_once(hvd, group, comm, front_end, compression, between):
    """Gradients that are not cleared after a step hold momentum, which would grow with each step."""
    factor = 0.9 if compression is RECOMMENDED else 0
    made = Script(
        comm, front_end, compression, lambda parameters: torch.optim.SGD(parameters, 0.1, factor, foreach=True)
    )
    refused = comm.Get_size() > 1 and between == "nothing"
    message = rf"rank {comm.Get_rank()}: gradients were not cleared between two steps.*zero_grad\(\)"
    for step in range(2):
        with pytest.raises(RuntimeError, match=message) if refused and step else nullcontext():
            made.backward(step)
            made.step()
        if between == "autograd.grad" and front_end != "FSDP":
            probe(made, step)
        if between in ("zeros", "cleared", "autograd.grad"):
            made.optimizer.zero_grad(set_to_none=between != "zeros")
        for p in made.parameters if between == "filled" else ():
            p.grad = torch.full_like(p, 1e-3)  # as a script that adds a penalty by hand


@pytest.mark.parametrize("registered", ["before the exchange", "after the first step"])
def test_a_step_inside_of_backward_is_refused(group, comm, registered):
    """FSDP2's gradients are complete in hooks of parameters without a sparse exchange, but not with one."""
    optimizers = {}

    def make(parameters):
        optimizers.update((p, torch.optim.SGD([p], lr=0.1)) for p in parameters)
        for p in optimizers if registered == "before the exchange" else ():
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        return list(optimizers.values())

    made = Script(comm, "FSDP", TOPKA, make)
    if registered == "after the first step":
        made.backward(0)
        for p, optimizer in optimizers.items():
            optimizer.step()
            optimizer.zero_grad()
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    message = rf"rank {comm.Get_rank()}: SGD takes a step inside of backward\(\)"
    with pytest.raises(RuntimeError, match=message) if comm.Get_size() > 1 else nullcontext():
        made.backward(1)


@pytest.mark.parametrize("front_end", ["DDP", "FSDP"])
@pytest.mark.parametrize("undoable", [False, True])
def test_an_optimizer_that_replaces_the_given_one_is_named(group, comm, front_end, undoable):
    """Its steps would not count: with ``undoable``, every exchange would be undone."""
    made = Script(comm, front_end, TOPKA, undoable=undoable)
    for step in range(2):
        made.optimizer.zero_grad()
        made.backward(step)
        made.step()
    made.optimizer = torch.optim.AdamW(made.inner.parameters())
    for step in range(2):
        made.optimizer.zero_grad()
        refused = comm.Get_size() > 1 and step
        message = rf"rank {comm.Get_rank()}: AdamW, which the exchange was not given, has applied the gradients"
        with pytest.raises(RuntimeError, match=message) if refused else nullcontext():
            made.backward(step)
        made.step()


@pytest.mark.parametrize("front_end", GRADIENTS)
@pytest.mark.parametrize("given", [True, False])
def test_a_loss_scale_that_the_exchange_does_not_know_is_reported_once(hvd, group, comm, front_end, given, caplog):
    """Residuals would stay in the unit of an earlier scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    made = Script(comm, front_end, TOPKA, lambda ps: torch.optim.SGD(ps, 0.1), grad_scaler=scaler if given else None)
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        for step in range(4):
            made.optimizer.zero_grad()
            made.backward(step, scaler.get_scale())
            scaler.scale(torch.ones(()))  # which creates its scale
            with made.optimizer.skip_synchronize() if front_end == "Horovod" else nullcontext():
                scaler.step(made.optimizer)
            scaler.update()
    reports = [message for message in caplog.messages if "pass its scaler as grad_scaler" in message]
    assert everywhere(comm, len(reports) == (comm.Get_size() > 1 and comm.Get_rank() == 0 and not given))


@pytest.mark.parametrize("front_end", GRADIENTS)
def test_a_param_group_that_was_removed_is_named(hvd, group, comm, front_end):
    def make(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": others}, {"params": [first]}], lr=0.1)

    made = Script(comm, front_end, TOPKA, make)
    made.backward(0)
    made.step()
    del made.optimizer.param_groups[1]
    message = rf"^rank {comm.Get_rank()}: param group 1 of SGD was removed.*lr=0"
    with pytest.raises(RuntimeError, match=message) if comm.Get_size() > 1 else nullcontext():
        made.model.zero_grad()
        made.backward(1)


@pytest.mark.parametrize("front_end", GRADIENTS)
@pytest.mark.parametrize("frozen", [True, False])
def test_losses_of_other_models_may_fill_gradients_after_a_step(hvd, group, comm, front_end, frozen):
    """As the generator's loss does with those of the critic, which clears them before its own backward pass."""
    ends = []
    for others in (False, True):
        made = Script(comm, front_end, RECOMMENDED, undoable=True)
        for step in range(4):
            made.optimizer.zero_grad()
            made.backward(step)
            made.step()
            made.inner.requires_grad_(not frozen)
            if others:
                x = torch.ones(8, 12, requires_grad=True)
                made.model(x).sum().backward()
                if front_end == "Horovod" and not frozen:
                    made.optimizer.synchronize()
            made.inner.requires_grad_(True)
        ends.append(made.end())
    assert everywhere(comm, same(*ends))


class Outer(torch.optim.Optimizer):
    """Holds another optimizer, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.parametrize("front_end", ["DDP", "FSDP"])
@pytest.mark.parametrize("given", ["outer", "inner"])
def test_an_optimizer_may_hold_the_given_one_or_be_held_by_it(group, comm, front_end, given):
    outer = []

    def make(parameters):
        outer.append(Outer(torch.optim.SGD(parameters, lr=0.1)))
        return outer[0] if given == "outer" else outer[0].inner

    made = Script(comm, front_end, TOPKA, make, undoable=True)
    for step in range(4):
        made.model.zero_grad()
        made.backward(step)
        if step != 1:  # else its exchange is dropped
            outer[0].step()
    assert agree(comm, made.end())
