"""Momentum before the selection in fully sharded models: stock's updates are in the parameters or in a residual."""

from __future__ import annotations

import copy

import pytest
import torch
from combinations import halved
from front_ends import SHAPES, Model
from laws import everywhere
from scattered import gradients, held, scattered, some, sparse, summed, trained
from sharding import full, shard
from training import adamw, near, sgd

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

RATE = 0.1


class Both:
    """The same training with FSDP2 alone and with a sparse exchange."""

    def __init__(self, comm, mesh, spec, before=0, **of_sgd):
        self.comm = comm
        self.models = [shard(Model(), mesh) for _ in range(2)]
        self.optimizers = [sgd(model, lr=RATE, **of_sgd) for model in self.models]
        for number in range(before):
            self.step(number)
        self.exchange = scattered(self.models[1], sparse(spec), self.optimizers[1])

    def step(self, number, used=tuple(SHAPES), factor=1):
        mine = {name: factor * one for name, one in gradients(self.comm.Get_rank(), number).items() if name in used}
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            model(mine).backward()
            optimizer.step()

    def owed(self):
        """What the parameters lack, by the ranks' residuals; a collective call."""
        if self.comm.Get_size() == 1:
            return {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        residuals = summed(self.comm, held(self.exchange))
        return {name: RATE / self.comm.Get_size() * one for name, one in residuals.items()}

    def check(self):
        """Assert that the residuals are what the parameters lack."""
        expected, found = map(full, self.models)
        owed = self.owed()
        ours = [one - lacking for one, lacking in zip(found, owed.values(), strict=True)]
        assert everywhere(self.comm, near(ours, expected, 1e-3))
        assert some(self.comm, {name: 100 * one for name, one in owed.items()})


FORMS = {"classic": {}, "Nesterov's": {"nesterov": True}, "dampened": {"dampening": 0.5}}


@pytest.mark.parametrize(("form", "wire"), halved(FORMS, ["float32", "log4"]))
def test_updates_of_stock_are_in_parameters_or_residuals(comm, shards, form, wire):
    """Also those of layers that some steps do not use, whose momentum then stands still."""
    both = Both(comm, shards, f"topka:memory=momentum,wire={wire}", **FORMS[form])
    for number in range(12):
        both.step(number, used=("first", "second") if number in (4, 7, 8) else tuple(SHAPES))
    both.check()


def test_momentum_of_earlier_steps_continues(comm, shards):
    """Each rank has that of its shards: it is not averaged."""
    both = Both(comm, shards, "topka:memory=momentum", before=3)
    for number in range(3, 9):
        both.step(number)
    both.check()


def test_a_loaded_state_of_the_optimizer_replaces_the_momentum(comm, shards):
    both = Both(comm, shards, "topka:memory=momentum")
    for number in range(3):
        both.step(number)
    both.optimizers[1].load_state_dict(copy.deepcopy(both.optimizers[0].state_dict()))
    for number in range(3, 9):
        both.step(number)
    both.check()


def test_momentum_of_a_compression(comm, shards):
    both = Both(comm, shards, "dgc:momentum=0.9,masking=False", momentum=0)
    both.optimizers[0] = sgd(both.models[0], lr=RATE)
    for number in range(9):
        both.step(number)
    both.check()


def test_recommended_keeps_what_its_limit_cuts(comm, shards):
    """The owner of a region keeps it, of which it keeps nothing otherwise. The second layer is sent dense."""
    both, rank = Both(comm, shards, "recommended:wire=float32"), comm.Get_rank()
    start, velocity, total = full(both.models[1]), dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 0.0)
    for number in range(26):
        factor = 16 if number == 25 else 1
        both.step(number, factor=factor)
        for name, mean in summed(comm, gradients(rank, number)).items():
            velocity[name] = 0.9 * velocity[name] + factor * mean / comm.Get_size()
            total[name] = total[name] + 0.6 * velocity[name] + 0.4 / 0.1 * factor * mean / comm.Get_size()
    if comm.Get_size() == 1:
        return
    owed = both.owed()
    moved = [(before - after) / RATE for before, after in zip(start, full(both.models[1]), strict=True)]
    ours = {name: one + owed[name] / RATE for name, one in zip(SHAPES, moved, strict=True) if name != "second"}
    assert everywhere(comm, near(ours.values(), [total[name] for name in ours], 1e-2))  # of values up to a thousand
    buckets = [bucket for bucket in both.exchange.state_dict()["buckets"] if "memory" in bucket]
    own = [bucket["memory"]["residual"].view(comm.Get_size(), -1)[rank] for bucket in buckets]
    assert everywhere(comm, any(bool(one.any()) for one in own))


@pytest.mark.parametrize("optimizer", [sgd, pytest.param(adamw, marks=pytest.mark.nightly)], ids=["SGD", "AdamW"])
def test_recommended_chooses_its_density_and_follows_dense_training(comm, shards, optimizer):
    """Without arguments; here at steps too short for its first hundred."""
    compression = hvs.parse("recommended:trial=2,trial_steps=10,dense_below=0")
    expected, _ = trained(comm, shards, steps=30, optimizer=optimizer)
    ours, exchange = trained(comm, shards, compression, steps=30, optimizer=optimizer)
    vectors = [torch.nn.utils.parameters_to_vector(one) for one in (ours, expected)]
    distance = float((vectors[0] - vectors[1]).norm() / vectors[1].norm())
    assert everywhere(comm, distance < 0.5), distance
    assert everywhere(comm, comm.Get_size() == 1 or exchange.traffic.bytes_sent > 0)
