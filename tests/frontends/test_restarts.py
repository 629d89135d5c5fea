"""Learning rates that fall near 0 and rise again: sparse training stays near dense training.

All front ends are in ``test_situations.py``.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from laws import everywhere
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, OneCycleLR
from training import mlp, sgd, train, wrap

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

STEPS = 90
SCHEDULERS = {
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, STEPS // 3),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 1e-4, 0.1, STEPS // 6, cycle_momentum=False),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, STEPS, cycle_momentum=optimizer.defaults["momentum"] > 0),
}
OPTIMIZERS = {
    "heavy ball": {},
    "Nesterov": {"nesterov": True, "weight_decay": 1e-3},
    "dampening": {"dampening": 0.5},
    "no momentum": {"momentum": 0},
}
SPECS = ["topka", "oktopk:keep=4", "recommended:collective=topka"]


def norm(comm, compression, schedule, optimizer):
    """Return the norm of the parameters after training."""
    model = mlp()
    stepping = wrap(model, compression, sgd(model, **optimizer))
    scheduler = SCHEDULERS[schedule](stepping)
    for step in range(STEPS):
        train(stepping, model, comm.Get_rank(), [step])
        scheduler.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()


CASES = [
    pytest.param(*case, marks=pytest.mark.nightly if number % 3 or case[0] != "restarts" else ())
    for number, case in enumerate(product(SCHEDULERS, SPECS, OPTIMIZERS))
]


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "spec", "optimizer"), CASES)
def test_the_parameters_grow_no_further_than_in_dense_training(hvd, comm, spec, schedule, optimizer):
    density, own = f"{spec}{',' if ':' in spec else ':'}density=", OPTIMIZERS[optimizer]
    sparse, dense = (norm(comm, hvs.parse(f"{density}{one},dense_below=0"), schedule, own) for one in (0.05, 1.0))
    assert everywhere(comm, 0 < sparse <= 1.2 * dense), (sparse, dense)
