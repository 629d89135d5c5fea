"""Densities that change while the model trains, decided alike on every rank, traced and logged."""

from __future__ import annotations

import logging

import pytest
from laws import everywhere
from states import same
from training import agree, loss_of, mlp, owed, settings, snapshot, train, wrap

import horovod_sparse as hvs
from horovod_sparse import metrics

pytestmark = pytest.mark.mpi

ACCORDION = {"high_density": 0.2, "interval": 1, "steps_per_epoch": 3}


@pytest.fixture
def densities():
    """Reads the densities in force so far, by bucket."""
    metrics.clear()
    metrics.enable()
    yield read_densities
    metrics.enable(False)
    metrics.clear()


def read_densities():
    by_bucket = {}
    for span in metrics.spans():
        if span.name == "density":
            by_bucket.setdefault(span.details["bucket"], []).append(span.details["density"])
    return by_bucket


def test_a_warm_up_follows_the_epochs_that_the_script_tells(hvd, comm, densities, caplog):
    model, rank = mlp(), comm.Get_rank()
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        optimizer = wrap(model, hvs.Compression.topka(**settings(density=1 / 16), schedule="warmup", warmup=1))
        for step in range(4):
            optimizer.set_epoch(step // 2)
            train(optimizer, model, rank, [step])
    if comm.Get_size() == 1:
        return
    seen = densities()
    assert everywhere(comm, all(one == [1 / 4, 1 / 4, 1 / 16, 1 / 16] for one in seen.values()))
    logged = [record.getMessage() for record in caplog.records if "density" in record.getMessage()]
    assert everywhere(comm, len(logged) == (2 * len(seen) if rank == 0 else 0))


def test_an_epoch_that_nobody_told_is_an_error_on_every_rank_and_loses_nothing(hvd, comm):
    model = mlp()
    optimizer = wrap(model, hvs.Compression.topka(**settings(), schedule="warmup"))
    if comm.Get_size() == 1:
        return
    loss_of(model, comm.Get_rank(), 0).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer.set_epoch\(epoch\)"):
        optimizer.step()
    assert everywhere(comm, owed(optimizer) == 0)


GRAVAC = {"cf_max": 500, "window": 2, "collective": "oktopk", "sparsifier": "reusedtopk"}


@pytest.mark.parametrize(
    "compression",
    [
        hvs.Compression.gravac(10, cf_max=100, window=3, eps=0.5, dense_below=0, bucket_bytes=1200),
        hvs.Compression.accordion(0.02, change=0.3, dense_below=0, bucket_bytes=1200, **ACCORDION),
        hvs.Compression.gravac(2, eps=0.9, dense_below=0, bucket_bytes=1200, **GRAVAC),
    ],
    ids=["gravac", "accordion", "gravac with oktopk"],
)
def test_ranks_with_different_gradients_decide_alike(hvd, comm, densities, compression):
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model, compression)
    for step in range(16):
        optimizer.zero_grad()
        (loss_of(model, rank, step) * (1 + 5 * rank * (step % 13 == 0))).backward()  # very different norms
        optimizer.step()
    assert agree(comm, snapshot(model))
    if comm.Get_size() == 1:
        return
    seen = comm.allgather(densities())
    assert all(one == seen[0] for one in seen)
    assert len({density for one in seen[0].values() for density in one}) > 1  # something was decided


def test_a_restored_optimizer_goes_on_with_its_schedule(hvd, comm):
    compression = hvs.Compression.accordion(0.02, change=0.3, dense_below=0, bucket_bytes=1200, **ACCORDION)
    one, other, rank = mlp(), mlp(), comm.Get_rank()
    first, second = wrap(one, compression), wrap(other, compression)
    train(first, one, rank, range(7))
    other.load_state_dict(one.state_dict())
    second.load_compression_state_dict(first.compression_state_dict())
    pairs = ((first, one), (second, other))
    assert everywhere(comm, same(*(train(*pair, rank, range(7, 13)) for pair in pairs)))


def test_gravac_decides_once_for_all_buckets_also_for_those_that_come_later(hvd, comm):
    """A layer learns from the tenth step on."""
    model, rank = mlp(), comm.Get_rank()
    model[2].requires_grad_(False)
    compression = hvs.Compression.gravac(2, window=3, cf_step=1.5, cf_max=1e6, dense_below=0, bucket_bytes=1200)
    optimizer = wrap(model, compression)
    metrics.clear()
    metrics.enable()
    try:
        for step in range(24):
            if step == 10:
                model[2].requires_grad_(True)
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            weighed = [span.details for span in metrics.spans() if span.name == "weigh"]
            metrics.clear()
            if comm.Get_size() > 1:
                assert {one["bucket"] for one in weighed} == set(range(len(optimizer.exchange.worker.buckets)))
                assert len({one["chosen"] for one in weighed}) == 1
                assert comm.bcast(weighed) == weighed
    finally:
        metrics.enable(False)
        metrics.clear()
    assert agree(comm, snapshot(model))
