"""Momentum that is taken over from the optimizer: at density 1 it is torch's, and the script sees no difference."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from laws import everywhere
from states import same
from training import agree, closure_of, loss_of, mlp, near, sgd, snapshot, wrap
from trainings import FRONT_ENDS, WHOLE, falling, train_plain, train_through

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(memory="momentum", **WHOLE)


def adam(model, **settings):
    return torch.optim.Adam(model.parameters(), **{"lr": 0.0, **settings})


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.0, **settings})


def shape_of(state):
    """A state_dict with shapes in the place of tensors."""
    if isinstance(state, dict):
        return {key: shape_of(value) for key, value in state.items()}
    if isinstance(state, list):
        return [shape_of(value) for value in state]
    return tuple(state.shape) if isinstance(state, torch.Tensor) else state


def cycled(optimizer, step):
    """What OneCycleLR does to the momentum; now and then there is none."""
    momentum = 0.95 - 0.01 * (step % 11)
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (momentum, 0.99)
        else:
            group["momentum"] = 0.0 if step % 50 == 49 and not group["nesterov"] else momentum


COUPLED = {"weight_decay": 0.05}
CASES = [
    pytest.param("Horovod", sgd, {}, id="SGD"),
    pytest.param("Horovod", sgd, {"nesterov": True, **COUPLED}, id="nesterov", marks=pytest.mark.full),
    pytest.param(
        "Horovod", sgd, {"dampening": 0.2, "maximize": True, **COUPLED}, id="dampening", marks=pytest.mark.full
    ),
    pytest.param("DDP", sgd, {"dampening": 0.2, "fused": True, **COUPLED}, id="DDP", marks=pytest.mark.slow),
    pytest.param("Horovod", adamw, {"maximize": True}, id="AdamW"),
    pytest.param("Horovod", adam, {"amsgrad": True}, id="Adam", marks=pytest.mark.full),
    pytest.param("DDP", adam, {}, id="DDP-Adam", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("front_end", "make", "settings"), CASES)
def test_at_density_1_it_is_the_optimizer_of_torch(hvd, group, comm, front_end, make, settings):
    """Whatever learning rate and momentum do, for parameters of every size, and so are state and settings."""
    sign = -1 if settings.get("maximize") else 1
    given = {"rate": falling, "loss": lambda *at: sign * loss_of(*at), "steps": 110, "change": cycled}
    model, ours = mlp(torch.float64), mlp(torch.float64)
    expected = make(model, **settings)
    train_plain(comm, model, expected, **given)
    replica, optimizer = FRONT_ENDS[front_end](ours, EVERYTHING, make(ours, **settings))
    train_through(comm, replica, optimizer, **given)
    assert everywhere(comm, near(snapshot(ours), snapshot(model), 1e-8))
    assert agree(comm, snapshot(ours))
    assert everywhere(comm, shape_of(optimizer.state_dict()) == shape_of(expected.state_dict()))


def test_decay_that_adam_adds_to_the_gradient_has_no_momentum(hvd, comm):
    """So that it acts a little earlier, also at density 1: what that changes is less than what the decay does."""
    ends = []
    for decay, train in ((0.0, train_plain), (0.05, train_plain), (0.05, train_through)):
        model = mlp(torch.float64)
        optimizer = adam(model, weight_decay=decay)
        wrapped = wrap(model, EVERYTHING, optimizer) if train is train_through else optimizer
        train(comm, model, wrapped, rate=lambda step: 0.001)
        ends.append(torch.cat([p.flatten() for p in snapshot(model)]))
    without, expected, end = ends
    assert everywhere(comm, (end - expected).norm() < 0.5 * (expected - without).norm())
    assert everywhere(comm, torch.equal(end, expected) == (comm.Get_size() == 1))


def test_the_settings_of_the_optimizer_are_the_users(hvd, comm, caplog):
    """Between steps, in a step's closure, and after a step that failed; OneCycleLR finds and changes them."""
    model, rank, seen = mlp(), comm.Get_rank(), []
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        optimizer = wrap(model, hvs.Compression.recommended(dense_below=100), sgd(model, weight_decay=0.05))
    assert everywhere(comm, ("m of SGD has the form 0.6 u + 0.4 / (1 - m) g" in caplog.text) == (rank == 0))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    def closure():
        seen.append(optimizer.param_groups[0]["momentum"])
        return closure_of(optimizer, model, rank, len(seen))()

    for _ in range(10):
        optimizer.step(closure)
        seen.append(optimizer.param_groups[0]["momentum"])
        scheduler.step()
    assert everywhere(comm, seen[::2] == seen[1::2])
    assert everywhere(comm, len(set(seen)) == 10)
    optimizer.param_groups[0]["lr"] = "no number"
    closure()
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step(closure)
    assert everywhere(comm, optimizer.param_groups[0]["momentum"] == seen[-1])


@pytest.mark.parametrize("make", [sgd, pytest.param(adamw, marks=pytest.mark.full)])
def test_below_density_1_every_rank_ends_with_the_same_bits(hvd, group, comm, make):
    """Through both front ends, by one algorithm: auto measures, and may choose another one for each."""
    settings = {"density": 0.05, "dense_below": 100, "bucket_bytes": 1200}
    sparse, results = hvs.Compression.recommended(collective="topka", **settings), []
    for front_end in FRONT_ENDS.values():
        model = mlp()
        replica, optimizer = front_end(model, sparse, make(model, weight_decay=0.05))
        train_through(comm, replica, optimizer, steps=30, change=cycled)
        results.append(snapshot(model))
        assert agree(comm, results[-1])
    assert everywhere(comm, comm.Get_size() == 1 or same(*results))
    assert everywhere(comm, not near(results[0], snapshot(mlp()), 1e-3))


# --- the state ---


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_state_of_the_plain_optimizer_goes_on(hvd, comm, make):
    """SGD's as if it had been wrapped from the beginning; on rank 0, from which the others get it."""
    model, settings = mlp(torch.float64), {"weight_decay": 0.05}
    optimizer = make(model, **settings)
    train_plain(comm, model, optimizer, steps=20)
    ours = mlp(torch.float64)
    wrapped = wrap(ours, EVERYTHING, make(ours, **settings))
    if comm.Get_rank() == 0:
        wrapped.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    assert everywhere(comm, same(shape_of(wrapped.state_dict()), shape_of(optimizer.state_dict())))
    ours.load_state_dict(model.state_dict())
    again = {"loss": lambda replica, rank, step: loss_of(replica, rank, step + 20), "steps": 20}
    train_plain(comm, model, optimizer, **again)
    train_through(comm, ours, wrapped, **again)
    assert everywhere(comm, near(snapshot(ours), snapshot(model), 1e-8 if make is sgd else 0.2))


# --- optimizers whose momentum stays theirs ---


def test_momentum_that_cannot_be_taken_over_is_applied_after_the_selection(hvd, comm, caplog):
    """As with the residual, and rank 0 says so; where there is none, there is nothing to say."""
    results = []
    for memory in ("residual", "momentum"):
        model = mlp()
        of_torch = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)
        with caplog.at_level(logging.WARNING, "horovod_sparse"):
            compression = hvs.Compression.topka(density=0.05, dense_below=100, memory=memory)
            optimizer = wrap(model, compression, of_torch)
        assert everywhere(comm, ("momentum of RMSprop" in caplog.text) == (memory == "momentum" and comm.rank == 0))
        train_through(comm, model, optimizer, steps=5)
        results.append(snapshot(model))
    assert everywhere(comm, same(*results))
    caplog.clear()
    wrap(model := mlp(), compression, torch.optim.RMSprop(model.parameters()))
    assert everywhere(comm, not caplog.text)
