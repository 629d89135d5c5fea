"""Unit of the residuals: what is held back stays the same as an update, or as a gradient, as suits the optimizer."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from laws import everywhere
from states import same
from torch import nn
from training import Given, settings, train, wrap

import horovod_sparse as hvs
from horovod_sparse.frontends.units import unit_for


class Lamb(torch.optim.Optimizer):
    """Optimizer class unknown to torch; its update does not matter."""

    def __init__(self, params, lr=0.1, **of_group):
        super().__init__(params, {"lr": lr, **of_group})

    def step(self, closure=None):
        """Nothing."""


SGD_LIKE = {"SGD", "ASGD", "LBFGS"}
# Muon takes matrices only.
CLASSES = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"]


@pytest.mark.parametrize("name", CLASSES)
def test_the_classes_of_torch_are_known_and_so_are_those_made_of_them(name):
    parameter = nn.Parameter(torch.zeros(2, 2))
    kind = getattr(torch.optim, name)
    expected = "update" if name in SGD_LIKE else "gradient"
    for cls in (kind, type("Derived", (kind,), {})):
        assert unit_for(cls([parameter], lr=0.1)) == expected
    assert unit_for(kind([parameter], lr=0.1), "update") == "update"


def test_other_classes_are_judged_by_their_param_groups():
    parameter = nn.Parameter(torch.zeros(2))
    assert unit_for(Lamb([parameter], 0.1, betas=(0.9, 0.999))) == "gradient"
    assert unit_for(Lamb([parameter], 0.1, eps=1e-8)) == "gradient"
    assert unit_for(Lamb([parameter], 0.1, trust=0.02)) == "update"


@pytest.mark.mpi
@pytest.mark.slow
def test_what_was_held_is_delivered_as_gradients_whatever_the_learning_rate_did(hvd, comm):
    """Over 120 steps: P * delivered + held = given. Updates are in ``test_sparse.py``."""
    model, rank = Given(torch.float64), comm.Get_rank()
    optimizer = wrap(model, optimizer=torch.optim.Adam(model.parameters(), lr=1.0))
    given = delivered = 0.0
    for step in range(120):
        optimizer.param_groups[0]["lr"] = (1.0, 0.1, 0.7, 0.01)[step // 30]
        optimizer.zero_grad()
        model.loss(rank, step).backward()
        optimizer.synchronize()
        given += model.total(rank, step)
        delivered += sum(p.grad.sum().item() for p in model.parameters())
        with optimizer.skip_synchronize():
            optimizer.step()
    buckets = optimizer.compression_state_dict()["buckets"]
    held = sum(bucket["memory"]["residual"].sum().item() for bucket in buckets)
    total = comm.allreduce(delivered + held)
    assert everywhere(comm, np.isclose(total, comm.allreduce(given), rtol=1e-9))
    assert comm.Get_size() == 1 or everywhere(comm, abs(held) > 0.01)


@pytest.mark.mpi
@pytest.mark.parametrize(("one", "other"), [("update", "gradient"), ("gradient", "update")])
def test_a_state_is_converted_to_the_other_unit(hvd, comm, one, other):
    """What is held is converted by the learning rate that it was written under."""
    if comm.Get_size() == 1:
        return
    model, rank = Given(torch.float64), comm.Get_rank()
    first = wrap(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), residual_unit=one)
    model.loss(rank, 0).backward()
    first.step()
    state = first.compression_state_dict()
    held = sum(bucket["memory"]["residual"].sum().item() for bucket in state["buckets"])
    fresh = Given(torch.float64)
    second = wrap(fresh, optimizer=torch.optim.SGD(fresh.parameters(), lr=0.25), residual_unit=other)
    second.load_compression_state_dict(state)
    assert everywhere(comm, same(second.compression_state_dict(), state))
    fresh.loss(rank, 1).backward()
    second.synchronize()
    left = [bucket["memory"]["residual"].sum().item() for bucket in second.compression_state_dict()["buckets"]]
    sent = comm.Get_size() * sum(p.grad.sum().item() for p in fresh.parameters())
    scale = 2.0 if other == "update" else 1.0
    expected = comm.allreduce(scale * held + fresh.total(rank, 1))
    assert everywhere(comm, np.isclose(comm.allreduce(sum(left)) + sent, expected))


@pytest.mark.mpi
def test_a_unit_that_was_guessed_is_named_when_it_matters(hvd, comm, caplog):
    for chosen in (None, "gradient"):
        caplog.clear()
        model, rank = Given(), comm.Get_rank()
        optimizer = wrap(model, optimizer=Lamb(model.parameters(), 1.0, betas=(0.9, 0.999)), residual_unit=chosen)
        with caplog.at_level(logging.WARNING, "horovod_sparse"):
            for step in range(4):
                optimizer.param_groups[0]["lr"] = 1.0 if step < 2 else 0.5 / step
                train(optimizer, model, rank, [step], Given.loss)
        said = [record.message for record in caplog.records if "residual_unit='update'" in record.message]
        assert everywhere(comm, len(said) == (comm.Get_size() > 1 and rank == 0 and chosen is None))
        assert all("kept in gradient units, a guess for the optimizer Lamb" in message for message in said)


@pytest.mark.mpi
def test_the_unit_is_compared_between_ranks_and_checked(hvd, comm):
    model, last = nn.Linear(5, 4), comm.Get_size() > 1 and comm.Get_rank() == comm.Get_size() - 1
    with pytest.raises(ValueError, match=r"residual_unit must be 'update', 'gradient' or None, not 'sum'"):
        wrap(model, residual_unit="sum")
    with pytest.raises(ValueError, match="residual_unit must be 'update'"):
        hvs.ddp.SparseState(hvs.Compression.topka(**settings()), None, (), residual_unit="sum")
    if comm.Get_size() > 1:
        with pytest.raises(ValueError, match=r"residual_unit differs between ranks: rank \d has"):
            wrap(model, residual_unit="gradient" if last else None)
