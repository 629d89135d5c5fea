"""Densities that change while the model trains, decided alike on every rank, traced and logged."""

from __future__ import annotations

import logging

import pytest
import torch
from laws import everywhere, same_bits
from test_optimizer_sparse import Linear
from training import loss_of, mlp, snapshot

import horovod_sparse as hvs
from horovod_sparse import trace

pytestmark = pytest.mark.mpi


@pytest.fixture
def densities():
    """Reads the densities in force so far, by bucket."""
    trace.clear()
    trace.enable()
    yield read_densities
    trace.enable(False)
    trace.clear()


def read_densities():
    by_bucket = {}
    for span in trace.spans():
        if span.name == "density":
            by_bucket.setdefault(span.details["bucket"], []).append(span.details["density"])
    return by_bucket


def wrap(model, compression, lr=0.1, **arguments):
    return hvs.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        named_parameters=model.named_parameters(),
        compression=compression,
        **arguments,
    )


def settings(**more):
    return {"dense_below": 0, "bucket_bytes": 1200, **more}


def train(optimizer, model, rank, steps, epoch_length=None):
    for step in steps:
        if epoch_length is not None:
            optimizer.set_epoch(step // epoch_length)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def test_a_warm_up_follows_the_epochs_that_the_script_tells(hvd, comm, densities, caplog):
    model = mlp()
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        optimizer = wrap(model, hvs.Compression.topka(1 / 16, schedule="warmup", warmup=1, **settings()))
        train(optimizer, model, comm.Get_rank(), range(4), epoch_length=2)
    if comm.Get_size() == 1:
        return
    seen = densities()
    assert everywhere(comm, all(one == [1 / 4, 1 / 4, 1 / 16, 1 / 16] for one in seen.values()))
    logged = [record.getMessage() for record in caplog.records if "density" in record.getMessage()]
    assert everywhere(comm, len(logged) == (2 * len(seen) if comm.Get_rank() == 0 else 0))


def test_an_epoch_that_nobody_told_is_an_error_on_every_rank_and_loses_nothing(hvd, comm):
    model = mlp()
    optimizer = wrap(model, hvs.Compression.topka(1 / 16, schedule="warmup", **settings()))
    if comm.Get_size() == 1:
        return
    loss_of(model, comm.Get_rank(), 0).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer.set_epoch\(epoch\)"):
        optimizer.step()
    residuals = [bucket["memory"]["residual"] for bucket in optimizer.compression_state_dict()["buckets"]]
    assert everywhere(comm, not any(residual.any() for residual in residuals))


@pytest.mark.slow
@pytest.mark.parametrize(
    "compression",
    [
        hvs.Compression.gravac(10, cf_max=100, window=3, eps=0.5, **settings()),
        hvs.Compression.accordion(0.02, high_density=0.2, interval=1, change=0.05, steps_per_epoch=3, **settings()),
        hvs.Compression.gravac(
            2, cf_max=500, window=2, eps=0.9, collective="oktopk", sparsifier="reusedtopk", **settings()
        ),
    ],
    ids=["gravac", "accordion", "gravac with oktopk"],
)
def test_ranks_with_different_gradients_decide_alike(hvd, comm, densities, compression):
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model, compression)
    for step in range(24):
        optimizer.zero_grad()
        (loss_of(model, rank, step) * (1 + 5 * rank * (step % 7 == 0))).backward()  # very different norms
        optimizer.step()
    assert all(same_bits(comm, p.numpy()) for p in snapshot(model))
    if comm.Get_size() == 1:
        return
    seen = comm.allgather(densities())
    assert all(one == seen[0] for one in seen)
    assert len({density for one in seen[0].values() for density in one}) > 1  # something was decided


def test_a_restored_optimizer_goes_on_with_its_schedule(hvd, comm):
    compression = hvs.Compression.accordion(
        0.02, high_density=0.2, interval=1, change=0.2, steps_per_epoch=3, **settings()
    )
    one, other = mlp(), mlp()
    first, second = wrap(one, compression), wrap(other, compression)
    train(first, one, comm.Get_rank(), range(7))
    other.load_state_dict(one.state_dict())
    second.load_compression_state_dict(first.compression_state_dict())
    for model, optimizer in ((one, first), (other, second)):
        train(optimizer, model, comm.Get_rank(), range(7, 16))
    assert everywhere(comm, all(map(torch.equal, snapshot(one), snapshot(other))))


def test_a_new_loss_scale_keeps_what_is_owed_the_same_update(hvd, comm):
    """P * moved + (learning rate / loss scale) * residuals = sum of learning rate * true gradients."""
    model, rank, given = Linear(), comm.Get_rank(), 0.0
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    compression = hvs.Compression.topka(0.05, **settings())
    optimizer = wrap(model, compression, lr=1.0, grad_scaler=scaler)
    scaler.scale(torch.zeros(1))  # creates its state
    for step, scale in enumerate([8.0, 8.0, 2.0, 16.0, 16.0]):
        scaler.update(scale)
        optimizer.zero_grad()
        loss = sum((p * g).sum() for p, g in zip(model.parameters(), model.gradients(rank, step), strict=True))
        (scale * loss).backward()
        given += sum(gradient.double().sum().item() for gradient in model.gradients(rank, step))
        optimizer.synchronize()
        for p in model.parameters():
            p.grad /= scale
        with optimizer.skip_synchronize():
            optimizer.step()
    moved = -sum(p.detach().double().sum().item() for p in model.parameters())
    buckets = optimizer.compression_state_dict()["buckets"]
    owed = sum(bucket["memory"]["residual"].double().sum().item() for bucket in buckets) / 16
    ranks = comm.Get_size()
    assert everywhere(comm, abs(ranks * moved + comm.allreduce(owed) - comm.allreduce(given)) < 1e-3)
    assert ranks == 1 or everywhere(comm, comm.allreduce(abs(owed)) > 0)
