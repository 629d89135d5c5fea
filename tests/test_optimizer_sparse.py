"""Below density 1: nothing is lost over a whole training run, and every rank holds the same bits."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from laws import everywhere, same_bits
from torch import nn
from training import Branches, batch, loss_of, mlp, snapshot

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi


def wrap(model, optimizer=None, **settings):
    compression = hvs.Compression.topka(**{"density": 0.05, "dense_below": 0, "bucket_bytes": 1200, **settings})
    plain = optimizer or torch.optim.SGD(model.parameters(), lr=0.125)
    return hvs.DistributedOptimizer(plain, named_parameters=model.named_parameters(), compression=compression)


def train(optimizer, model, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


class Linear(nn.Module):
    """A loss whose gradient is whatever a test wants: loss = sum of parameter times chosen gradient."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(300, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(7, 11, dtype=dtype))

    def gradients(self, rank, step):
        generator = torch.Generator().manual_seed(100 * rank + step)
        return [torch.randint(-64, 64, p.shape, generator=generator).to(p.dtype) / 8 for p in (self.first, self.second)]

    def backward(self, rank, step):
        pairs = zip((self.first, self.second), self.gradients(rank, step), strict=True)
        sum((p * gradient).sum() for p, gradient in pairs).backward()


def residual(optimizer):
    """All residuals of this rank, by the names of their parameters, summed."""
    return sum(bucket["memory"]["residual"].double().sum().item() for bucket in saved(optimizer))


def saved(optimizer):
    return optimizer.compression_state_dict()["buckets"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rates", [[1.0] * 6, [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]], ids=["constant", "falling"])
def test_every_gradient_is_in_the_parameters_or_in_a_residual(hvd, comm, dtype, rates):
    """P * (what the parameters moved) + learning rate * (sum of residuals) = sum of learning rate * gradients."""
    model, rank = Linear(dtype), comm.Get_rank()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
    given = 0.0
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model.backward(rank, step)
        given += rate * sum(gradient.double().sum().item() for gradient in model.gradients(rank, step))
        optimizer.step()
    moved = -sum(p.detach().double().sum().item() for p in model.parameters())
    owed = rates[-1] * residual(optimizer) if comm.Get_size() > 1 else 0.0
    ranks = comm.Get_size()
    assert everywhere(comm, np.isclose(ranks * moved + comm.allreduce(owed), comm.allreduce(given), rtol=1e-6))
    if ranks > 1:
        assert everywhere(comm, comm.allreduce(abs(owed)) > 0)  # or the test would show nothing


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD], ids=lambda o: o.__name__)
def test_every_rank_holds_the_same_parameters(hvd, comm, optimizer):
    model = mlp()
    train(wrap(model, optimizer(model.parameters(), lr=0.05)), model, comm.Get_rank(), range(10))
    assert all(same_bits(comm, p.numpy()) for p in snapshot(model))


def test_the_order_of_hooks_does_not_change_a_bit(hvd, comm):
    results = []
    for orders in (("left right",), ("right left",), ("left right", "right left")):
        model = Branches()
        optimizer = wrap(model)
        for step in range(6):
            optimizer.zero_grad()
            model(batch(comm.Get_rank(), step)[0], orders[(comm.Get_rank() + step) % len(orders)]).backward()
            optimizer.step()
        results.append(snapshot(model))
    for one, *others in zip(*results, strict=True):
        assert everywhere(comm, all(torch.equal(one, other) for other in others))


@pytest.mark.slow
def test_sparse_training_learns(hvd, comm):
    torch.manual_seed(0)
    teacher, model = nn.Linear(12, 4), nn.Linear(12, 4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(400):
        x, _ = batch(comm.Get_rank(), step)
        optimizer.zero_grad()
        loss = (model(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert everywhere(comm, np.mean(losses[-20:]) < 0.01 * np.mean(losses[:20]))


def test_one_percent_sends_a_fraction_of_the_bytes(hvd, comm):
    torch.manual_seed(0)
    model = nn.Linear(200, 200)
    optimizer = wrap(model, density=0.01)
    model(torch.randn(4, 200)).square().mean().backward()
    optimizer.step()
    others, elements = comm.Get_size() - 1, 200 * 200 + 200
    expected = others * (8 * round(0.01 * elements) + 8)
    assert everywhere(comm, abs(optimizer.traffic.bytes_sent - expected) <= 8 * others * 3)  # a length for each bucket


def test_small_parameters_travel_dense(hvd, comm):
    model = mlp()
    optimizer = wrap(model, dense_below=100)
    train(optimizer, model, comm.Get_rank(), range(2))
    dense = {name for bucket in saved(optimizer) if not bucket["memory"] for name in bucket["parameters"]}
    small = {"0.bias", "2.bias", "4.weight", "4.bias"}
    assert everywhere(comm, dense == (small if comm.Get_size() > 1 else set()))


def test_a_frozen_parameter_is_not_moved_by_its_residual(hvd, comm):
    model = mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(optimizer, model, comm.Get_rank(), range(3))
    frozen = model[0].weight.requires_grad_(False)
    before, owed = frozen.clone(), residual(optimizer)
    train(optimizer, model, comm.Get_rank(), range(3, 6))
    assert everywhere(comm, torch.equal(frozen, before))
    frozen.requires_grad_(True)
    train(optimizer, model, comm.Get_rank(), range(6, 9))
    assert everywhere(comm, not torch.equal(frozen, before))
    assert everywhere(comm, comm.Get_size() == 1 or owed != 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_is_seen_everywhere_and_poisons_no_residual(hvd, comm, bad):
    model = mlp()
    optimizer = wrap(model, bucket_bytes=10**6)
    train(optimizer, model, comm.Get_rank(), range(2))
    before = [bucket["memory"]["residual"] for bucket in saved(optimizer)]
    optimizer.zero_grad()
    (loss_of(model, comm.Get_rank(), 2) * (bad if comm.Get_rank() == 0 else 1.0)).backward()
    optimizer.synchronize()
    assert everywhere(comm, not all(p.grad.isfinite().all() for p in model.parameters()))
    after = [bucket["memory"]["residual"] for bucket in saved(optimizer)]
    assert everywhere(comm, all(map(torch.equal, before, after)))


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(hvd, comm, tmp_path):
    rank = comm.Get_rank()

    def build():
        model = mlp()
        return model, wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    model, optimizer = build()
    train(optimizer, model, rank, range(3))
    state = [model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()]
    torch.save(state, tmp_path / f"{rank}.pt")
    train(optimizer, model, rank, range(3, 6))
    resumed, restored = build()
    loaded = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
    resumed.load_state_dict(loaded[0])
    restored.load_state_dict(loaded[1])
    restored.load_compression_state_dict(loaded[2])
    train(restored, resumed, rank, range(3, 6))
    assert everywhere(comm, all(map(torch.equal, snapshot(model), snapshot(resumed))))


def test_a_state_of_another_model_is_refused(hvd, comm):
    model = mlp()
    optimizer = wrap(model)
    state = {"buckets": [{"parameters": ["elsewhere"], "unit": 1.0}]}
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: .*elsewhere.*load it with the model"):
        optimizer.load_compression_state_dict(state)


def test_residuals_are_not_read_during_an_exchange(hvd, comm):
    model = mlp()
    optimizer = wrap(model)
    loss_of(model, comm.Get_rank(), 0).backward()
    if comm.Get_size() > 1:
        with pytest.raises(RuntimeError, match="call it after step"):
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
            exchanged.extend(span for span in hvs.trace.spans() if span.name == "apply")

    model[0].weight.register_hook(wait)
    hvs.trace.clear()
    hvs.trace.enable()
    try:
        loss_of(model, comm.Get_rank(), 0).backward()
        assert everywhere(comm, bool(exchanged))
        assert everywhere(
            comm, exchanged[0].thread.startswith("horovod_sparse") and exchanged[0].details["bucket"] == 0
        )
        optimizer.synchronize()
        assert everywhere(comm, {"select", "agree", "exchange", "apply"} <= {span.name for span in hvs.trace.spans()})
    finally:
        hvs.trace.enable(False)
        hvs.trace.clear()
