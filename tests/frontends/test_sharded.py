"""The sparse reduce-scatter of fully sharded models: FSDP2's results at density 1, and nothing lost below it."""

from __future__ import annotations

import pytest
import torch
from combinations import halved
from front_ends import SHAPES
from laws import everywhere
from scattered import Given, check_conservation, gradients, held, some, summed, trained
from sharding import full, uneven, uneven_loss
from states import same
from torch import nn
from training import agree, loss_of, mlp, near, sgd

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

OPTIMIZERS = {
    "SGD": lambda model: sgd(model, weight_decay=0.01),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
}

FULL = pytest.mark.full


MODELS = {"even": (mlp, loss_of), "uneven": (uneven, uneven_loss)}
NODES = "hierarchical:node_ranks=2"
COMPRESSIONS = [
    *(f"topka:dense_below={most}" for most in (0, 50, 10000)),
    "topka:memory=momentum,dense_below=50",
    "recommended:wire=float32,dense_below=50",
    f"{NODES},dense_below=50",
    "auto:node_ranks=2,dense_below=50",
    "recommended:wire=float32,node_ranks=2,dense_below=50",
]


@pytest.mark.parametrize(("spec", "optimizer", "model"), halved(COMPRESSIONS, OPTIMIZERS, MODELS))
def test_density_1_equals_fsdp(comm, shards, spec, optimizer, model):
    make, loss = MODELS[model]
    how = {"make": make, "optimizer": OPTIMIZERS[optimizer], "loss": loss}
    expected, _ = trained(comm, shards, **how)
    ours, _ = trained(comm, shards, hvs.parse(f"{spec},density=1"), **how)
    assert everywhere(comm, near(ours, expected))
    assert agree(comm, ours)


QUICK = ["topka", "randomblock", "topka:wire=log4", f"{NODES},wire=log4"]
RULES = [*QUICK, "oktopk", "gaussiank", "randomk", "stable", "topka:wire=float16", NODES]


@pytest.mark.parametrize("spec", [*QUICK, pytest.param("oktopk", marks=FULL)])
def test_gradients_are_in_shards_or_residuals(comm, shards, spec):
    training = check_conservation(comm, shards, spec, 20)
    assert some(comm, training.owed)


@pytest.mark.full
@pytest.mark.parametrize(
    "spec",
    [
        "topka:schedule=measured,trial=2,trial_steps=10",
        pytest.param("topka:schedule=accordion,interval=2,steps_per_epoch=2", marks=pytest.mark.nightly),
        pytest.param("topka:schedule=warmup,steps_per_epoch=2", marks=pytest.mark.nightly),
        "gravac:cf_min=20,window=1,cf_max=100",
        pytest.param("topka:dense_steps=3", marks=pytest.mark.nightly),
    ],
)
def test_schedules(comm, shards, spec):
    """Also where everything is sent in some steps."""
    check_conservation(comm, shards, spec, 20)


@pytest.mark.nightly
@pytest.mark.parametrize("spec", RULES)
def test_gradients_are_in_shards_or_residuals_over_500_steps(comm, shards, spec):
    check_conservation(comm, shards, spec, 500)


def test_an_owner_keeps_nothing_of_its_own_shard(comm, shards):
    training, rank = Given(comm, shards, "topka"), comm.Get_rank()
    if training.ranks == 1:
        return
    for step in range(3):
        training.backward(step)
    state = training.exchange.state_dict()
    rows = [bucket["memory"]["residual"].view(training.ranks, -1) for bucket in state["buckets"] if "memory" in bucket]
    others = [number for number in range(training.ranks) if number != rank]
    assert everywhere(comm, rows and all(not row[rank].any() and row[others].any() for row in rows))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_residuals_follow_the_learning_rate_as_updates_with_sgd_only(comm, shards, optimizer):
    """Of a falling rate; all updates are in the parameters or in a residual."""
    make = {"SGD": lambda model: sgd(model, momentum=0), "AdamW": lambda model: torch.optim.AdamW(model.parameters())}
    training = Given(comm, shards, "topka", make[optimizer])
    start, given, rates = full(training.model), dict.fromkeys(SHAPES, 0.0), [0.1, 0.1, 0.02, 0.001]
    for step, rate in enumerate(rates):
        training.optimizer.param_groups[0]["lr"] = rate
        training.backward(step)
        training.optimizer.step()
        for name, total in summed(comm, gradients(comm.Get_rank(), step)).items():
            given[name] = given[name] + rate * total / training.ranks
        training.collect()
    if training.ranks == 1:
        return
    residuals = summed(comm, held(training.exchange))
    if optimizer == "AdamW":
        assert training.conserved()
        return
    for name, before, after in zip(SHAPES, start, full(training.model), strict=True):
        owed = rates[-1] / training.ranks * residuals[name]
        assert everywhere(comm, near([before - after + owed], [given[name]], 1e-4))
    assert some(comm, residuals)


MEMORIES = [
    "topka:memory=none",
    "topka:memory=conef,compressor=quantize",
    "topka:memory=partial,compressor=quantize",
    "topka:memory=improved,compressor=quantize",
    "conef:saving=0.5",
]


def fifteen_steps(comm, shards, compression=None):
    return trained(comm, shards, compression, steps=15, optimizer=lambda model: sgd(model, momentum=0))[0]


@pytest.fixture(scope="module")
def dense(comm, shards):
    return fifteen_steps(comm, shards)


@pytest.mark.parametrize("spec", MEMORIES)
def test_memories(comm, shards, dense, spec):
    """At a density of a half, training follows dense training, and two runs have the same bits."""
    compression = hvs.parse(f"{spec},density=0.5,dense_below=0")
    runs = [fifteen_steps(comm, shards, compression) for _ in range(2)]
    assert everywhere(comm, same(*runs))
    ours, theirs = map(nn.utils.parameters_to_vector, (runs[0], dense))
    distance = float((ours - theirs).norm() / theirs.norm())
    assert everywhere(comm, distance < 0.3), distance
    assert everywhere(comm, comm.Get_size() == 1 or distance > 0)
