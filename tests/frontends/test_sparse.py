"""Below density 1: nothing is lost over a whole training run, and every rank holds the same bits."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from laws import everywhere
from states import same
from torch import nn
from training import Branches, Given, agree, batch, loss_of, mlp, owed, settings, sgd, snapshot, train, wrap

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss scale"])
def test_every_gradient_is_in_the_parameters_or_in_a_residual(hvd, comm, dtype, scaled):
    """P * moved + sum of residuals as updates = sum of learning rate * gradients, whatever rate and loss scale do."""
    model, rank, ranks, given = Given(dtype), comm.Get_rank(), comm.Get_size(), 0.0
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    optimizer = wrap(model, optimizer=sgd(model, lr=1.0, momentum=0), grad_scaler=scaler)
    scaler.scale(torch.zeros(1))  # creates its state
    for step, (rate, scale) in enumerate([(1.0, 8.0), (0.5, 8.0), (0.5, 2.0), (0.25, 16.0), (0.25, 16.0)]):
        optimizer.param_groups[0]["lr"] = rate
        if scaled:
            scaler.update(scale)
        optimizer.zero_grad()
        scaler.scale(model.loss(rank, step)).backward()
        given += rate * model.total(rank, step)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    left = comm.allreduce(ranks * owed(optimizer)) if ranks > 1 else 0.0
    assert everywhere(comm, np.isclose(ranks * model.moved() + left, comm.allreduce(given), rtol=1e-6))
    assert ranks == 1 or abs(left) > 0  # or the test would show nothing


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_every_rank_holds_the_same_parameters(hvd, comm, kind):
    model = mlp()
    assert agree(
        comm, train(wrap(model, optimizer=kind(model.parameters(), lr=0.05)), model, comm.Get_rank(), range(6))
    )


def test_the_order_of_hooks_does_not_change_a_bit(hvd, comm):
    results = []
    for orders in (("left right",), ("right left",), ("left right", "right left")):
        model = Branches()
        optimizer = wrap(model)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(comm.Get_rank(), step)[0], orders[(comm.Get_rank() + step) % len(orders)]).backward()
            optimizer.step()
        results.append(snapshot(model))
    assert everywhere(comm, same(results[1], results[0]) and same(results[2], results[0]))


def test_sparse_training_learns(hvd, comm):
    torch.manual_seed(0)
    teacher, model = nn.Linear(12, 4), nn.Linear(12, 4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrap(model, hvs.Compression.topka(**settings(density=0.2)), sgd(model, lr=0.2, momentum=0))
    losses = []
    for step in range(100):
        x, _ = batch(comm.Get_rank(), step)
        optimizer.zero_grad()
        loss = (model(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert everywhere(comm, np.mean(losses[-10:]) < 0.03 * np.mean(losses[:10]))


def test_one_percent_sends_a_fraction_of_the_bytes(hvd, comm):
    torch.manual_seed(0)
    model = nn.Linear(200, 200)
    optimizer = wrap(model, hvs.Compression.topka(**settings(density=0.01)))
    model(torch.randn(4, 200)).square().mean().backward()
    optimizer.step()
    others, elements = comm.Get_size() - 1, 200 * 200 + 200
    expected = others * (8 * round(0.01 * elements) + 8)
    assert everywhere(comm, abs(optimizer.traffic.bytes_sent - expected) <= 40 * others * 3)  # lengths and headers


def test_small_parameters_travel_dense(hvd, comm):
    model = mlp()
    optimizer = wrap(model, hvs.Compression.topka(**settings(dense_below=100)))
    train(optimizer, model, comm.Get_rank(), range(2))
    buckets = optimizer.compression_state_dict()["buckets"]
    dense = {name for bucket in buckets if "memory" not in bucket for name in bucket["parameters"]}
    small = {"0.bias", "2.bias", "4.weight", "4.bias"}
    assert everywhere(comm, dense == (small if comm.Get_size() > 1 else set()))


def test_a_frozen_parameter_is_not_moved_by_its_residual(hvd, comm):
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model)
    train(optimizer, model, rank)
    frozen = model[0].weight.requires_grad_(False)
    before, left = frozen.clone(), owed(optimizer)
    train(optimizer, model, rank)
    assert everywhere(comm, torch.equal(frozen, before))
    frozen.requires_grad_(True)
    train(optimizer, model, rank)
    assert everywhere(comm, not torch.equal(frozen, before))
    assert everywhere(comm, comm.Get_size() == 1 or left != 0)


@pytest.mark.parametrize("spec", ["topka", "auto"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_is_seen_everywhere_and_changes_no_state(hvd, comm, bad, spec):
    """Neither a residual nor, with auto, the choice of the algorithm."""
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model, hvs.parse(f"{spec}:density=0.05,dense_below=0"))
    train(optimizer, model, rank, range(2))
    before = optimizer.compression_state_dict()
    optimizer.zero_grad()
    (loss_of(model, rank, 2) * (bad if rank == 0 else 1.0)).backward()
    optimizer.synchronize()
    assert everywhere(comm, not all(p.grad.isfinite().all() for p in model.parameters()))
    assert everywhere(comm, same(optimizer.compression_state_dict(), before))


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(hvd, comm, tmp_path):
    rank = comm.Get_rank()

    def build():
        model = mlp()
        return model, wrap(model, optimizer=sgd(model))

    model, optimizer = build()
    train(optimizer, model, rank)
    torch.save([model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()], tmp_path / "state")
    resumed, restored = build()
    loaded = torch.load(tmp_path / "state", weights_only=True)
    resumed.load_state_dict(loaded[0])
    restored.load_state_dict(loaded[1])
    restored.load_compression_state_dict(loaded[2])
    pairs = ((optimizer, model), (restored, resumed))
    assert everywhere(comm, same(*(train(*pair, rank, range(3, 6)) for pair in pairs)))


def test_a_state_of_another_model_is_refused(hvd, comm):
    optimizer = wrap(mlp())
    state = {"buckets": [{"parameters": ["elsewhere"]}]}
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: .*elsewhere.*load it with the model"):
        optimizer.load_compression_state_dict(state)


def test_a_state_that_is_damaged_in_its_last_bucket_changes_no_bucket(hvd, comm):
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model)
    train(optimizer, model, rank)
    damaged = optimizer.compression_state_dict()
    if comm.Get_size() == 1:
        return
    assert len(damaged["buckets"]) > 1
    damaged["buckets"][-1]["memory"]["residual"][0] = float("nan")
    train(optimizer, model, rank)
    before = optimizer.compression_state_dict()
    with pytest.raises(ValueError, match=rf"rank {rank}: .*residual.* not finite"):
        optimizer.load_compression_state_dict(damaged)
    assert everywhere(comm, same(optimizer.compression_state_dict(), before))


def test_residuals_are_not_read_during_an_exchange(hvd, comm):
    model = mlp()
    optimizer = wrap(model)
    loss_of(model, comm.Get_rank(), 0).backward()
    if comm.Get_size() > 1:
        with pytest.raises(RuntimeError, match="read it after step"):
            optimizer.compression_state_dict()
    optimizer.step()
    optimizer.compression_state_dict()


def test_the_exchange_runs_beside_the_backward_pass(hvd, comm):
    """The first layer's gradient is not computed before the last layer's bucket has been exchanged."""
    if comm.Get_size() == 1:
        return
    model = mlp()
    optimizer = wrap(model)
    exchanged = []

    def wait(gradient):
        deadline = time.monotonic() + 30
        while not exchanged and time.monotonic() < deadline:
            time.sleep(0.001)
            exchanged.extend(span for span in hvs.metrics.spans() if span.name == "apply")

    model[0].weight.register_hook(wait)
    hvs.metrics.clear()
    hvs.metrics.enable()
    try:
        loss_of(model, comm.Get_rank(), 0).backward()
        assert everywhere(comm, bool(exchanged))
        on_a_thread = exchanged[0].thread.startswith("horovod_sparse")
        assert everywhere(comm, on_a_thread and exchanged[0].details["bucket"] == 0)
        optimizer.synchronize()
        assert everywhere(comm, {"select", "agree", "exchange", "apply"} <= {span.name for span in hvs.metrics.spans()})
    finally:
        hvs.metrics.enable(False)
        hvs.metrics.clear()
