"""What is special to fully sharded models with a sparse reduce-scatter; other situations: ``test_situations.py``."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from front_ends import SHAPES, Model
from laws import everywhere
from scattered import EVERYTHING, SPARSE, Given, gradients, held, scattered, some, sparse, summed, trained
from sharding import full, shard, uneven, uneven_loss
from states import same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from training import loss_of, mlp, near, settings, sgd, train

import horovod_sparse as hvs
from horovod_sparse.frontends.fsdp import scattering
from horovod_sparse.frontends.registry import exchange_of

pytestmark = pytest.mark.mpi

NODES = "hierarchical:node_ranks=2"


@pytest.mark.parametrize("optimizer", [None, sgd], ids=["no optimizer", "optimizer"])
def test_passes_before_a_step_may_all_be_exchanged_without_momentum(comm, shards, caplog, optimizer):
    training = Given(comm, shards, "topka", optimizer)
    for step in range(6):
        training.backward(step)
        if step % 3 == 2:
            if optimizer is not None:
                training.optimizer.step()
            training.collect()
    assert training.conserved()
    assert some(comm, training.owed)
    assert everywhere(comm, not any("are scaled" in message for message in caplog.messages))


def test_residuals_of_unused_parameters_are_neither_sent_nor_changed(comm, shards):
    """Of complete units, and of parameters in a unit that is used otherwise: FSDP then leaves them out."""
    for whole in (True, False):
        training = Given(comm, shards, "topka")
        if not whole:
            training.model = fully_shard(Model(), mesh=shards)
            training.exchange = scattered(training.model, SPARSE)
        for step in range(4):
            training.backward(step)
            training.collect()
        before = held(training.exchange)
        training.backward(4, used=("first", "second"))
        assert everywhere(comm, training.model.third.weight.grad is None)
        training.collect()
        assert everywhere(comm, training.ranks == 1 or same(held(training.exchange)["third"], before["third"]))
        training.backward(5, used=("third",))
        training.collect()
        training.backward(6)
        training.collect()
        assert training.conserved()
        assert some(comm, training.owed)


def test_parameters_of_a_unit_that_some_ranks_use(comm, shards):
    """Owners that do not use them get the mean, too; a parameter that no rank uses gets no gradient."""
    training = Given(comm, shards, "topka")
    training.model = fully_shard(Model(), mesh=shards)
    training.exchange = scattered(training.model, sparse("topka"))
    last = comm.Get_rank() == training.ranks - 1
    for step in range(4):
        training.backward(step, used=("first", "second", "third") if last else ("first",))
        assert everywhere(comm, all(p.grad is not None for p in training.model.parameters()))
        training.collect()
        assert training.conserved()
    training.backward(4, used=("first", "second") if last else ("first",))
    used = [getattr(training.model, name).weight.grad is not None for name in SHAPES]
    assert everywhere(comm, used == [True, True, False])
    training.collect()
    assert training.conserved()
    assert some(comm, training.owed)


def test_several_outermost_modules(comm, shards):
    results = []
    for compression in (None, EVERYTHING):
        model = mlp()
        for layer in model[::2]:
            fully_shard(layer, mesh=shards)
        optimizer = sgd(model)
        exchange = None if compression is None else scattered(model, compression, optimizer)
        train(optimizer, model, comm.Get_rank(), range(4))
        results.append(full(model))
    assert everywhere(comm, near(*results))
    assert everywhere(comm, comm.Get_size() == 1 or exchange._exchange.worker.progress().position == (4, 0))


def test_param_groups_of_one_unit(comm, shards):
    """Each has a learning rate that its residuals follow."""
    results = []
    for compression in (None, EVERYTHING, SPARSE):
        model = shard(mlp(), shards)
        weights, biases = ([p for p in model.parameters() if (p.ndim > 1) == weight] for weight in (True, False))
        groups = [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        exchange = None if compression is None else scattered(model, compression, optimizer)
        train(optimizer, model, comm.Get_rank(), range(4))
        results.append(full(model))
    assert everywhere(comm, near(*results[:2]))
    buckets = 6 + 1  # that of the counts of ranks with a gradient
    assert everywhere(comm, comm.Get_size() == 1 or len(exchange._exchange.worker.buckets) == buckets)


POLICIES = {
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "reduced in float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@pytest.mark.parametrize("spec", ["topka", NODES])
@pytest.mark.parametrize("policy", POLICIES)
def test_mixed_precision(comm, shards, policy, spec):
    def loss(model, rank, step):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * rank + step))
        return model(x).float().square().mean()

    expected, _ = trained(comm, shards, loss=loss, mp_policy=POLICIES[policy])
    everything = hvs.parse(f"{spec}{',' if ':' in spec else ':'}density=1,dense_below=0")
    ours, _ = trained(comm, shards, everything, loss=loss, mp_policy=POLICIES[policy])
    assert everywhere(comm, near(ours, expected, 1e-2 if policy == "bfloat16" else 1e-6))
    trained(comm, shards, SPARSE, loss=loss, mp_policy=POLICIES[policy])


@pytest.mark.parametrize(("spec", "steps"), [("topka", 0), ("topka", 4), (NODES, 4)])
def test_gradients_that_are_not_finite_reach_their_owner_and_no_residual(comm, shards, spec, steps):
    """The others of the unit are in a shard or in a residual, also after a step without the layer."""
    training, rank = Given(comm, shards, spec), comm.Get_rank()
    for number in range(steps):
        training.backward(number, used=("first", "second") if number == 2 else tuple(SHAPES))
        training.collect()
    mine = gradients(rank, steps)
    for name, total in summed(comm, mine).items():
        training.owed[name] += total
    if rank == training.ranks - 1:
        mine["third"][-1] = torch.inf
    training.model(mine).backward()
    third = training.model.third.weight.grad.full_tensor()
    assert everywhere(comm, bool(third[-1].isinf().all() and third[:-1].isfinite().all()))
    training.collect()
    residuals = summed(comm, held(training.exchange))
    residuals["third"], training.owed["third"] = residuals["third"][:-1], training.owed["third"][:-1]
    if training.ranks > 1:
        assert everywhere(comm, near(residuals.values(), training.owed.values(), 1e-3))


def test_a_further_pass_is_refused_where_exchanges_are_undoable(comm, shards):
    training, rank = Given(comm, shards, "topka", sgd, undoable=True), comm.Get_rank()
    training.backward(0)
    if training.ranks > 1:
        with pytest.raises(RuntimeError, match=f"rank {rank}: gradients are added to exchanged ones"):
            training.backward(1)
    comm.Barrier()


def test_gradients_zeroed_in_place_that_some_ranks_hold_no_element_of(comm, shards):
    """All ranks take them for cleared: the next step is that of a run without them."""
    ends = []
    for dropped in (True, False):
        model = shard(uneven(), shards)
        optimizers = [sgd(model[:3]), sgd(model[4])]
        exchange = scattered(model, EVERYTHING, optimizers, undoable=True)
        for step in range(3):
            if step == 1 and not dropped:
                continue
            uneven_loss(model, comm.Get_rank(), step).backward()
            for optimizer in optimizers:
                if step != 1:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        ends.append([full(model), exchange.state_dict()])
    assert everywhere(comm, same(*ends))


def test_gradients_zeroed_in_place_take_delivered_momentum_back(comm, shards):
    """An unused layer then moves no further, as one whose gradient is None."""
    results = []
    for to_none in (True, False):
        training = Given(comm, shards, "topka:memory=momentum", sgd)
        for number in range(6):
            training.optimizer.zero_grad(set_to_none=to_none)
            training.backward(number, used=("first", "second") if number in (2, 4) else tuple(SHAPES))
            training.optimizer.step()
        results.append(full(training.model))
    if training.ranks > 1:
        assert everywhere(comm, near(*results, 1e-5))


def test_the_exchange_begins_during_the_backward_pass(comm, shards):
    """And frees the gradients of a unit: those of two more at most are in memory."""
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(8)))
    shard(model, shards)
    exchange = scattered(model, hvs.parse("topka:density=0.05,dense_below=0"))
    started, inputs, alive = [], [], []
    model[0].register_full_backward_pre_hook(lambda *_: started.append(exchange._exchange.worker.leaves_at()[1]))
    begin = scattering.Unit.__call__

    def noted(unit, output_tensor, input_tensor, *more, **named):
        begin(unit, output_tensor, input_tensor, *more, **named)
        inputs.append(weakref.ref(input_tensor))
        gc.collect()
        alive.append(sum(one() is not None for one in inputs))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scattering.Unit, "__call__", noted)
        model(torch.ones(8, 12, requires_grad=True)).sum().backward()
    if comm.Get_size() > 1:
        assert everywhere(comm, started[0] >= 6 and len(alive) == 8 and max(alive) <= 3)


def refused(comm, message, model, compression=SPARSE, optimizer=None, **more):
    with pytest.raises(ValueError, match=message):
        scattered(model, compression, optimizer, **more)
    comm.Barrier()


def test_what_is_not_supported_is_refused_by_name_on_every_rank(comm, shards, monkeypatch):
    rank, ranks = comm.Get_rank(), comm.Get_size()
    model = shard(mlp(), shards)
    refused(comm, "no module of this Sequential is sharded", mlp())
    refused(comm, "density in a preset|use fully_shard alone", model, hvs.Compression.dense())
    clipping = hvs.Compression.recommended(0.01, max_norm=1.0)
    refused(comm, f"rank {rank}: max_norm=1.0 does not work", model, clipping, sgd(model))
    for name in ("micro", "exdyna", "deft", "artopk"):
        refused(comm, f"rank {rank}: sparsifier '{name}' does not work", model, hvs.parse(name))
    grid = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicate", "shard"))
    refused(comm, "one mesh of one dimension", shard(mlp(), grid))
    half = MixedPrecisionPolicy(param_dtype=torch.float16)
    refused(comm, "reduced in torch.float16", shard(mlp(), shards, mp_policy=half))
    refused(comm, "reduced in torch.float64", shard(mlp(torch.float64), shards))
    refused(comm, "CPUOffloadPolicy", shard(mlp(), shards, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    refused(
        comm,
        f"rank {rank}: undoable=True needs the optimizer.*pass optimizer to sparse_reduce_scatter",
        model,
        undoable=True,
    )
    divided = shard(mlp(), shards)
    divided[0].set_gradient_divide_factor(3.0)
    refused(comm, f"rank {rank}: set_gradient_divide_factor", divided)
    scattered(model, SPARSE)
    refused(comm, f"rank {rank}: sparse_reduce_scatter was called for this model before", model)
    if ranks > 1:
        other = SPARSE if rank else hvs.Compression.topka(**settings(density=0.1))
        refused(comm, "density", shard(mlp(), shards), other)
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter")
    refused(comm, r"needs FSDPModule.set_custom_reduce_scatter of torch 2\.9", shard(mlp(), shards))


def test_checkpoints_find_the_exchange_of_a_model_on_a_single_rank(comm, meshes_of_group):
    mesh = init_device_mesh("cpu", (comm.Get_size(), 1), mesh_dim_names=("replicate", "shard"))["shard"]
    model = shard(mlp(), mesh)
    optimizer = sgd(model)
    exchange = scattered(model, SPARSE, optimizer)
    assert everywhere(comm, exchange_of(model, optimizer) is exchange)


@pytest.mark.parametrize("compression", [SPARSE, hvs.Compression.recommended(**settings())])
def test_clipping_below_density_1_is_reported_once(comm, shards, caplog, compression):
    """At density 1, it is not: see ``test_situations.py``."""
    model = shard(mlp(), shards)
    optimizer = sgd(model)
    scattered(model, compression, optimizer)
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, comm.Get_rank(), step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    reports = [message for message in caplog.messages if "are scaled after the exchange" in message]
    assert everywhere(comm, len(reports) == (comm.Get_rank() == 0 and comm.Get_size() > 1))
    assert all("limit" in message and "max_norm" not in message for message in reports)
