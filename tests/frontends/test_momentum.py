"""Momentum before the selection equals momentum SGD at density 1, and is delivered completely below."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from checkpointing import Training
from laws import everywhere
from states import same
from torch import nn
from training import Given, agree, closure_of, embedding_loss, loss_of, means, mlp, near, sgd, snapshot, train, wrap
from trainings import FRONT_ENDS, STEPS, WHOLE, constant, falling, plain, train_plain, train_through

import horovod_sparse as hvs
from horovod_sparse.checkpoint import Checkpoints
from horovod_sparse.schedules import Constant

pytestmark = pytest.mark.mpi


DECAY, NESTEROV = {"weight_decay": 0.05}, {"nesterov": True, "masking": False, "fresh": 0.4}
CASES = [
    ("Horovod", {}, {}, {}),
    ("Horovod", NESTEROV, DECAY, {}),
    pytest.param("Horovod", {}, {**DECAY, "maximize": True}, {}, marks=pytest.mark.full),
    pytest.param("DDP", NESTEROV, DECAY, {}, marks=pytest.mark.slow),
    pytest.param("Horovod", {}, DECAY, {"backward_passes_per_step": 2}, marks=[pytest.mark.full, pytest.mark.slow]),
    pytest.param("Horovod", {}, DECAY, {"groups": 2}, marks=[pytest.mark.full, pytest.mark.slow]),
]


@pytest.mark.parametrize(("front_end", "options", "settings", "wrapping"), CASES, ids=str)
def test_at_density_1_the_memory_equals_momentum_sgd(hvd, group, comm, front_end, options, settings, wrapping):
    """Whatever the learning rate does, for parameters of every size, on one rank, too, and with masking or without."""
    passes, sign = wrapping.get("backward_passes_per_step", 1), -1 if "maximize" in settings else 1

    def loss(model, rank, step):
        for number in range(1, passes):
            (sign * loss_of(model, rank, passes * step + number)).backward()
        return sign * loss_of(model, rank, passes * step)

    given = {"rate": lambda step: falling(step) / passes, "loss": loss}
    expected = plain(comm, mlp(torch.float64), nesterov=options.get("nesterov", False), **given, **settings)
    model = mlp(torch.float64)
    compression = hvs.Compression.dgc(**WHOLE, **options)
    replica, optimizer = FRONT_ENDS[front_end](model, compression, sgd(model, momentum=0, **settings), **wrapping)
    train_through(comm, replica, optimizer, **given)
    assert everywhere(comm, near(snapshot(model), expected))
    assert agree(comm, snapshot(model))


def decayed(model, **settings):
    return sgd(model, **{"lr": constant(0), "weight_decay": 0.05, **settings})


def adam(model, **settings):
    return torch.optim.Adam(model.parameters(), lr=constant(0), **settings)


TAKEN_OVER = hvs.Compression.topka(memory="momentum", **WHOLE)
KINDS = {
    "of the compression": (hvs.Compression.dgc(**WHOLE), decayed, {"momentum": 0}),
    "taken over": (TAKEN_OVER, decayed, {}),
    "of Adam": (TAKEN_OVER, adam, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["Horovod", pytest.param("DDP", marks=pytest.mark.full)])
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_changing_loss_scale_and_skipped_steps_have_no_effect(hvd, group, comm, front_end, fused, kind):
    compression, make, settings = KINDS[kind]
    model, ours, rank = mlp(torch.float64), mlp(torch.float64), comm.Get_rank()
    train_plain(comm, model, make(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    of_torch = make(ours, fused=fused, **settings)
    replica, optimizer = FRONT_ENDS[front_end](ours, compression, of_torch, grad_scaler=scaler)
    for step in range(STEPS):
        for overflows in [True, False] if step % 7 == 3 else [False]:
            optimizer.zero_grad()
            loss = loss_of(replica, rank, step)
            if overflows and rank == comm.Get_size() - 1:
                loss = loss + (ours[4].weight * torch.inf).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(2.0 ** (step % 11))
    assert everywhere(comm, near(snapshot(ours), snapshot(model), 1e-7 if make is adam else 1e-9))


def test_a_step_with_a_closure(hvd, group, comm):
    for front_end in FRONT_ENDS.values():
        expected, model = plain(comm, mlp(torch.float64), steps=9, weight_decay=0.05), mlp(torch.float64)
        of_torch = sgd(model, lr=constant(0), momentum=0, weight_decay=0.05)
        replica, optimizer = front_end(model, hvs.Compression.dgc(**WHOLE), of_torch)
        for step in range(9):
            optimizer.step(closure_of(optimizer, replica, comm.Get_rank(), step))
        assert everywhere(comm, near(snapshot(model), expected))


def test_embeddings_with_sparse_gradients(hvd, comm):
    """These travel whole, by Horovod."""
    results = []
    for replaced in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 12, sparse=True), nn.Linear(12, 4))
        if replaced:
            optimizer = wrap(model, hvs.Compression.dgc(**WHOLE), sgd(model, momentum=0))
        else:
            optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
        results.append(train(optimizer, model, comm.Get_rank(), range(9), embedding_loss))
    assert everywhere(comm, near(*results, 1e-5))


def test_the_momentum_of_an_adaptive_optimizer(hvd, comm):
    """Adam without a first moment; it makes its state in the first step, which ours must not hinder."""
    model = mlp()
    adam = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.0, 0.999), weight_decay=0.01)
    optimizer = wrap(model, hvs.Compression.dgc(**WHOLE), adam)
    train(optimizer, model, comm.Get_rank(), range(5))
    buffers = {name: "momentum_buffer" in optimizer.state[p] for name, p in model.named_parameters()}
    whole = {name: comm.Get_size() == 1 or p.numel() < 100 for name, p in model.named_parameters()}
    assert everywhere(comm, buffers == whole)
    assert agree(comm, snapshot(model))


def test_a_frozen_parameter_is_not_moved_by_its_residual_and_momentum(hvd, comm):
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model, hvs.Compression.dgc(**{**WHOLE, "density": 0.05}))
    for step in range(6):
        for p in (model[0].weight, model[4].bias):
            p.requires_grad_(not 2 <= step < 4)
        before = [model[0].weight.clone(), model[4].bias.clone()]
        train(optimizer, model, rank, [step])
        assert everywhere(comm, same([model[0].weight, model[4].bias], before) == (2 <= step < 4))


def test_momentum_that_the_optimizer_gets_later_is_refused(hvd, comm):
    """As a scheduler may give it."""
    model = mlp()
    optimizer = wrap(model, hvs.Compression.dgc(**WHOLE))
    optimizer.param_groups[0]["momentum"] = 0.85
    loss_of(model, comm.Get_rank(), 0).backward()
    with pytest.raises(RuntimeError, match=r"SGD has been given momentum, too.*cycle_momentum=False"):
        optimizer.step()


# --- the state ---


@pytest.mark.parametrize(
    ("spec", "momentum"),
    [
        ("dgc:density=0.05,nesterov=True", 0.0),
        ("dgc:density=1.0", 0.0),
        ("topka:density=0.05,memory=momentum", 0.9),
        pytest.param("topka:density=1.0,memory=momentum", 0.9, marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(hvd, comm, tmp_path, spec, momentum):
    rank, checkpoints = comm.Get_rank(), Checkpoints(comm.bcast(tmp_path) / "checkpoints")

    def made():
        training = Training(spec, rank, momentum, amp=True)
        training.optimizer.param_groups[0]["weight_decay"] = 0.05
        return training

    run = made().train(4)
    checkpoints.save(4, **run.states, data={"losses": run.losses})
    run.train(3)
    resumed = made()
    resumed.losses = checkpoints.load(**resumed.states).data["losses"]
    assert everywhere(comm, same(run.bits(), resumed.train(3).bits()))


def test_the_momentum_is_broadcast_with_the_optimizers_state(hvd, comm):
    """Where rank 0 has loaded it, and the others are new."""
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model, hvs.Compression.dgc(**WHOLE))
    train(optimizer, model, rank)
    expected = [optimizer.state.get(p, {}) for p in model.parameters()]
    other = mlp()
    resumed = wrap(other, hvs.Compression.dgc(**WHOLE))
    if rank == 0:
        resumed.load_state_dict(optimizer.state_dict())
    hvd.broadcast_optimizer_state(resumed, root_rank=0)
    assert everywhere(comm, any(expected))
    assert everywhere(comm, same([resumed.state.get(p, {}) for p in other.parameters()], expected))


def test_momentum_continues_with_another_world_size(hvd, comm, tmp_path):
    """At density 1, in the bits of what the mean gradient would give; every rank has the same gradients."""
    rank, ranks, folder = comm.Get_rank(), comm.Get_size(), comm.bcast(tmp_path) / "checkpoints"
    parts = {number: hvd.add_process_set(list(range(number))) for number in range(1, ranks)}
    try:
        for before, after in [(1, ranks), (ranks - 1, ranks)] if ranks > 1 else []:
            for part, steps in ((before, range(20)), (after, range(20, 40))):
                process_set = parts.get(part, hvd.global_process_set)
                if rank < part:
                    model = mlp(torch.float64)
                    of_torch = decayed(model, momentum=0)
                    optimizer = wrap(model, hvs.Compression.dgc(**WHOLE), of_torch, process_set=process_set)
                    checkpoints = Checkpoints(folder, process_set=process_set)
                    if steps[0]:
                        checkpoints.load(model=model, optimizer=optimizer)
                    train(optimizer, model, 0, steps)
                    if not steps[0]:
                        checkpoints.save(20, model=model, optimizer=optimizer)
                comm.Barrier()
            alone = mlp(torch.float64)
            assert everywhere(comm, near(snapshot(model), train(decayed(alone), alone, 0, range(40))))
    finally:
        for part in parts.values():
            hvd.remove_process_set(part)


# --- clipping ---


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_each_rank_clips_its_complete_gradient(hvd, group, comm, front_end, scale):
    """Over several buckets, small parameters and others, to the threshold by sqrt(P), whatever the loss scale."""
    rank, most = comm.Get_rank(), 0.5
    model, scaler = mlp(torch.float64), torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
    own = torch.autograd.grad(loss_of(model, rank, 0), list(model.parameters()))
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in own))
    factor = min(1.0, most / math.sqrt(comm.Get_size()) / norm)
    assert everywhere(comm, factor < 1)
    before = snapshot(model)
    compression = hvs.Compression.dgc(**WHOLE, max_norm=most)
    replica, optimizer = FRONT_ENDS[front_end](model, compression, sgd(model, lr=1.0, momentum=0), grad_scaler=scaler)
    scaler.scale(loss_of(replica, rank, 0)).backward()
    scaler.step(optimizer)
    moved = [old - p for old, p in zip(before, snapshot(model), strict=True)]
    assert everywhere(comm, near(moved, means(comm, [factor * one for one in own])))


def test_a_nonfinite_gradient_is_not_clipped_and_changes_no_state(hvd, comm):
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model, hvs.Compression.dgc(**WHOLE, max_norm=0.1))
    train(optimizer, model, rank, range(2))
    before = [optimizer.compression_state_dict(), optimizer.state_dict()]
    optimizer.zero_grad()
    (loss_of(model, rank, 2) * (torch.inf if rank == 0 else 1.0)).backward()
    optimizer.synchronize()
    assert everywhere(comm, comm.Get_size() == 1 or not all(p.grad.isfinite().all() for p in model.parameters()))
    after = [optimizer.compression_state_dict(), optimizer.state_dict()]
    assert everywhere(comm, rank > 0 or same(after, before))
    residuals = [bucket["memory"]["residual"] for bucket in after[0]["buckets"] if bucket.get("memory")]
    assert everywhere(comm, all(residual.isfinite().all() for residual in residuals))


@pytest.fixture
def now_and_then_dense(own_rules):
    @hvs.register("schedule", "alternating")
    class Alternating(Constant):
        """Sends everything for some steps, then a selection."""

        @dataclass(frozen=True, kw_only=True)
        class Options(Constant.Options):
            """No further options."""

        predictable = False

        def _densities(self, step):
            return (1.0 if step.number // 7 % 3 == 1 else 0.05,)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["constant", "alternating", "signs"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize("fresh", [None, 0.4])
def test_below_density_1_every_gradient_is_delivered_ten_times(
    hvd, comm, now_and_then_dense, schedule, nesterov, fresh
):
    """Momentum multiplies by 1 / (1 - m): what was delivered, what is held and what velocities and buffers still owe.

    Also if dense steps come between, and while a parameter is frozen, whose gradients are then none.
    """
    model, rank, ranks = Given(torch.float64), comm.Get_rank(), comm.Get_size()
    settings = {"memory": "momentum", "dense_below": 0, "bucket_bytes": 1200, "fresh": fresh}
    if schedule == "signs":
        compression = hvs.Compression.onebit(dense_steps=20, **settings)
    else:
        compression = hvs.Compression.topka(density=0.05, schedule=schedule, **settings)
    optimizer = wrap(model, compression, sgd(model, lr=1.0, nesterov=nesterov))
    given = 0.0
    for step in range(200):
        model.second.requires_grad_(not 50 <= step < 100)
        train(optimizer, model, rank, [step], Given.loss)
        learning = [p.requires_grad for p in model.parameters()]
        given += sum(
            one.sum().item() for one, learns in zip(model.gradients(rank, step), learning, strict=True) if learns
        )
        if step % 10 == 9 and ranks > 1:
            owed = still_owed(optimizer, nesterov, 0.1 * nesterov if fresh is None else fresh)
            total = comm.allreduce(model.moved() / ranks + owed / ranks)
            assert everywhere(comm, total == pytest.approx(10 * comm.allreduce(given) / ranks, rel=1e-9))


def still_owed(optimizer, nesterov, fresh):
    """Return what this rank's memory and its share of the buffers will deliver in the long run."""
    owed = 0.0
    states = {name: optimizer.state[p] for p, name in optimizer._parameter_names.items()}
    for bucket in optimizer.compression_state_dict()["buckets"]:
        memory, handover = bucket["memory"], bucket["handover"]
        buffers = sum(states[key]["momentum_buffer"].sum().item() for key in bucket["parameters"] if states[key])
        ranks = optimizer.exchange.ranks
        owed += memory["residual"].sum().item() * (10 if memory["of_gradients"] else 1)
        owed += 9 * (1 - fresh) * memory["velocity"].sum().item()
        owed += 9 * (0.9 if nesterov and handover["plain"] else 1) * (buffers - handover["values"].sum().item() / ranks)
    return owed
