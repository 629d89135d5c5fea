"""Momentum before the selection equals momentum SGD at density 1, and is delivered completely below."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from combinations import halved
from laws import everywhere
from states import same
from training import WHOLE, Given, agree, loss_of, mlp, near, sgd, snapshot, train, wrap

import horovod_sparse as hvs
from horovod_sparse.checkpoint import Checkpoints
from horovod_sparse.schedules import Constant

pytestmark = pytest.mark.mpi


def decayed(model, **settings):
    return sgd(model, **{"lr": 0.02, "weight_decay": 0.05, **settings})


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
@pytest.mark.parametrize(
    ("schedule", "nesterov", "fresh"), halved(["constant", "alternating", "signs"], [False, True], [None, 0.4])
)
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
    for step in range(100):
        model.second.requires_grad_(not 40 <= step < 70)
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
        part = 0.9 if nesterov and handover["mode"] == "all" else 1
        owed += 9 * part * (buffers - handover["values"].sum().item() / ranks)
    return owed
