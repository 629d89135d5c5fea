"""Densities that change while the model trains, decided alike on every rank, traced and logged."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest
import torch
from laws import everywhere
from training import agree, loss_of, mlp, settings, snapshot, train, wrap

import horovod_sparse as hvs
from horovod_sparse import metrics
from horovod_sparse.engine.bucket import Bucket

pytestmark = pytest.mark.mpi

ACCORDION = {"high_density": 0.2, "interval": 1, "steps_per_epoch": 3}


def densities(spans):
    """Return the densities in force so far, by bucket."""
    by_bucket = {}
    for span in spans:
        if span.name == "density":
            by_bucket.setdefault(span.details["bucket"], []).append(span.details["density"])
    return by_bucket


def test_a_warm_up_follows_the_epochs_that_the_script_tells(hvd, comm, spans, caplog):
    model, rank = mlp(), comm.Get_rank()
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        optimizer = wrap(model, hvs.Compression.topka(**settings(density=1 / 16), schedule="warmup", warmup=1))
        for step in range(4):
            optimizer.set_epoch(step // 2)
            train(optimizer, model, rank, [step])
    if comm.Get_size() == 1:
        return
    seen = densities(spans())
    assert everywhere(comm, all(one == [1 / 4, 1 / 4, 1 / 16, 1 / 16] for one in seen.values()))
    logged = [record.getMessage() for record in caplog.records if "density" in record.getMessage()]
    assert everywhere(comm, len(logged) == (2 * len(seen) if rank == 0 else 0))


PRESET_GRAVAC = {"schedule": "gravac", "collective": "topka", "window": 3, "eps": 0.5, "dense_below": 0}
GRAVAC = {"cf_max": 500, "window": 2, "collective": "oktopk", "sparsifier": "reusedtopk"}


@pytest.mark.parametrize(
    "compression",
    [
        hvs.Compression.gravac(10, cf_max=100, window=3, eps=0.5, dense_below=0, bucket_bytes=1200),
        hvs.Compression.accordion(0.02, change=0.3, dense_below=0, bucket_bytes=1200, **ACCORDION),
        hvs.Compression.gravac(2, eps=0.9, dense_below=0, bucket_bytes=1200, **GRAVAC),
        hvs.Compression.recommended(trial_steps=1, trial=2, dense_below=0, bucket_bytes=1200),
        hvs.Compression.recommended(0.1, **PRESET_GRAVAC),
    ],
    ids=["gravac", "accordion", "gravac with oktopk", "measured", "gravac in the preset"],
)
def test_ranks_with_different_gradients_decide_alike(hvd, comm, spans, compression):
    def loss(model, rank, step):
        return loss_of(model, rank, step) * (1 + 5 * rank * (step % 13 == 0))  # very different norms

    model = mlp()
    assert agree(comm, train(wrap(model, compression), model, comm.Get_rank(), range(16), loss))
    if comm.Get_size() == 1:
        return
    seen = comm.allgather(densities(spans()))
    assert all(one == seen[0] for one in seen)
    assert len({density for one in seen[0].values() for density in one}) > 1  # something was decided


def test_gravac_decides_once_for_all_buckets_also_for_those_that_come_later(hvd, comm, spans):
    """A layer learns from the tenth step on."""
    model, rank = mlp(), comm.Get_rank()
    model[2].requires_grad_(False)
    compression = hvs.Compression.gravac(2, window=3, cf_step=1.5, cf_max=1e6, dense_below=0, bucket_bytes=1200)
    optimizer = wrap(model, compression)
    for step in range(24):
        if step == 10:
            model[2].requires_grad_(True)
        train(optimizer, model, rank, [step])
        weighed = [span.details for span in spans() if span.name == "weigh"]
        metrics.clear()
        if comm.Get_size() > 1:
            assert {one["bucket"] for one in weighed} == set(range(len(optimizer.exchange.worker.buckets)))
            assert len({one["chosen"] for one in weighed}) == 1
            assert comm.bcast(weighed) == weighed
    assert agree(comm, snapshot(model))


@pytest.mark.parametrize("slow", ["exchange", "computing"])
def test_local_steps_are_proposed_where_the_exchange_takes_most_of_a_step(hvd, comm, caplog, monkeypatch, slow):
    exchange = Bucket.exchange

    def slowly(*given):
        time.sleep(0.05 * (slow == "exchange"))
        exchange(*given)

    def loss(model, rank, step):
        time.sleep(0.3 * (slow == "computing"))  # a busy machine may delay an exchange
        return loss_of(model, rank, step)

    monkeypatch.setattr(Bucket, "exchange", slowly)
    model, rank = mlp(), comm.Get_rank()
    compression = hvs.Compression.recommended(trial_steps=1, trial=3, densities=(0.2, 0.05), dense_below=0)
    optimizer = wrap(model, compression)
    train(optimizer, model, rank, range(8), loss)
    if comm.Get_size() == 1:
        return
    share = optimizer.statistics()["total/trial_exposed_share"]
    assert everywhere(comm, comm.bcast(share) == share and (share > 0.5) == (slow == "exchange"))
    proposed = [one for one in caplog.records if "hvs.LocalOptimizer" in one.getMessage()]
    assert everywhere(comm, len(proposed) == (rank == 0 and slow == "exchange"))


def test_only_the_clock_of_the_host_measures_what_is_exposed(hvd, comm):
    """On a GPU, gradients are there later than the host submits them."""
    optimizer = wrap(mlp())
    if comm.Get_size() == 1:
        return
    worker, found = optimizer.exchange.worker, []
    for device in ("cpu", "cuda"):
        worker.leave_out(worker.keys[0])
        worker.buckets[0].layout = replace(worker.buckets[0].layout, torch_device=torch.device(device))
        worker.buckets[0].collected.ended = 500_000_000  # ns after the start
        worker.finish()
        found.append(worker._exposed)
    assert everywhere(comm, found == [0.5, 0.0])
