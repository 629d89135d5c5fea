"""Densities are measured whatever the training does besides: all ranks decide alike, and nothing is lost."""

from __future__ import annotations

import time

import pytest
import torch
from combinations import halved
from front_ends import start
from laws import everywhere
from states import same
from training import Given, agree, conserved, loss_of, mlp, sgd, snapshot, train, wrap

import horovod_sparse as hvs
from horovod_sparse.collectives import auto
from horovod_sparse.costs.network import Link
from horovod_sparse.engine.bucket import Bucket
from horovod_sparse.engine.pipeline.sparse import SparsePipeline

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

TRIALS = {"densities": (1, 0.2, 0.05), "trial": 2, "trial_steps": 12, "dense_below": 0}


def measured(**more):
    return hvs.Compression.recommended(**{"collective": "topka", "wire": None, "bucket_bytes": 1200, **TRIALS, **more})


def decided(state):
    """What each bucket remembers of the trials."""
    buckets = state.exchange.state_dict()["buckets"] if hasattr(state, "exchange") else state.state_dict()["buckets"]
    return [bucket["schedule"] for bucket in buckets]


def check_decisions(comm, *states):
    """All ranks and buckets have tried and decided the same, and are done with it."""
    found = [decided(state) for state in states]
    assert comm.bcast(found) == found
    for schedules in found:
        assert all(schedule == schedules[0] for schedule in schedules)
        if comm.Get_size() > 1:
            assert schedules[0]["history"]
            assert schedules[0]["state"] != "trial"


either = pytest.mark.parametrize("kind", ["Horovod", "DDP"])


def begin(kind, model, compression, lr=0.1, momentum=0.0, **more):
    return start(kind, model, lambda given: torch.optim.SGD(given, lr=lr, momentum=momentum), compression, **more)


@either
def test_passes_that_accumulate_are_one_step_and_nothing_is_lost(hvd, group, comm, kind):
    rank, model = comm.Get_rank(), Given()
    one = begin(kind, model, measured(memory="residual"), lr=1, passes=2)
    for step in range(20):
        one.optimizer.zero_grad()
        for half in range(2):
            with one.front_end.accumulating(one, last=half == 1):
                one.model(rank, 2 * step + half).backward()
        one.optimizer.step()
    assert conserved(comm, model, one.exchange, model.total(rank, *range(40)))
    check_decisions(comm, one.exchange)
    assert everywhere(comm, comm.Get_size() == 1 or {s["steps"] for s in decided(one.exchange)} == {20})


@either
def test_steps_that_a_scaler_skips_during_the_trials_leave_no_trace(hvd, group, comm, caplog, kind):
    """The decisions of a run without them are repeated by a run with them, with the same bits."""
    rank, results = comm.Get_rank(), []
    for skipped in ([], [1, 4, 9]):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, backoff_factor=1 - 2**-24)
        one = begin(kind, mlp(), measured(), momentum=0.9, grad_scaler=scaler)
        for step in sorted([*range(20), *(at + 0.5 for at in skipped)]):
            one.optimizer.zero_grad()
            loss = loss_of(one.model, rank, int(step))
            if step % 1 and rank == comm.Get_size() - 1:
                loss = loss + (one.module[4].weight * torch.inf).sum()
            scaler.scale(loss).backward()
            scaler.step(one.optimizer)
            scaler.update(new_scale=1024.0)
        check_decisions(comm, one.exchange)
        assert agree(comm, snapshot(one.module))
        assert everywhere(comm, all(p.isfinite().all() for p in one.module.parameters()))
        results.append([schedule["steps"] for schedule in decided(one.exchange)])
    assert everywhere(comm, results[0] == results[1])


@pytest.mark.parametrize("steps", [3, 20], ids=["during the trials", "after them"])
def test_nothing_is_lost_while_ranks_have_joined(hvd, comm, steps):
    rank, model = comm.Get_rank(), Given()
    steps = range(steps + 8 * rank)
    optimizer = wrap(model, measured(memory="residual"), sgd(model, lr=1, momentum=0))
    train(optimizer, model, rank, steps, Given.loss)
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
    assert conserved(comm, model, optimizer, model.total(rank, *steps))
    found = decided(optimizer)
    assert comm.bcast(found) == found


def test_uneven_inputs_with_ddps_join(group, comm):
    rank, one = comm.Get_rank(), begin("DDP", mlp(), measured())
    with one.model.join():
        train(one.optimizer, one.model, rank, range(14 + 5 * rank))
    assert agree(comm, snapshot(one.module))
    check_decisions(comm, one.exchange)


def test_both_front_ends_repeat_decisions_with_the_same_bits(hvd, group, comm, tmp_path):
    """Those that Horovod's optimizer has recorded, with DDP, and the other way around."""
    if comm.Get_size() == 1:
        return  # one rank decides nothing, and records nothing
    results = []
    for first in ("Horovod", "DDP"):
        path = str(comm.bcast(tmp_path) / first)
        for kind in (first, "DDP" if first == "Horovod" else "Horovod"):
            one = begin(kind, mlp(), measured(**{"record" if kind == first else "decisions": path}), momentum=0.9)
            results.append(train(one.optimizer, one.model, comm.Get_rank(), range(20)))
            comm.Barrier()  # rank 0 has written all decisions
            assert comm.bcast(one.exchange.statistics().get("total/decisions", 0)) == (kind == first)
        assert everywhere(comm, same(*results[-2:]))


@pytest.fixture
def slow(monkeypatch):
    """A link that takes a second for everything, for the clock and for the predictions of `auto`."""
    monkeypatch.setattr(auto, "measure_network", lambda *_: (Link(0.0, 1e-3), None))
    exchange = Bucket.exchange

    def slowly(bucket, *given):
        exchange(bucket, *given)
        if isinstance(bucket.pipeline, SparsePipeline):
            time.sleep(bucket.pipeline.rules._density)

    monkeypatch.setattr(Bucket, "exchange", slowly)


@pytest.mark.parametrize(("kind", "collective"), halved(["Horovod", "DDP"], ["topka", "auto"]))
def test_two_optimizers_in_one_program_choose_the_same_where_the_link_leaves_no_doubt(
    hvd, group, comm, slow, kind, collective
):
    """They are constructed one after the other, and learn in turns, as those of a GAN do."""
    given = {"densities": (0.5, 0.05), "trial": 3, "trial_steps": 12, "bucket_bytes": None}
    rank, compression = comm.Get_rank(), measured(collective=collective, **given)
    both = [begin(kind, mlp(), compression) for _ in range(2)]
    for step in range(14):
        for one in both:
            train(one.optimizer, one.model, rank, [step])
    if comm.Get_size() == 1:
        return
    check_decisions(comm, *(one.exchange for one in both))
    assert everywhere(comm, [decided(one.exchange)[0]["chosen"] for one in both] == [0, 0])
    statistics = [one.exchange.statistics() for one in both]
    algorithms = [{name for name in numbers if name.startswith("total/steps_")} for numbers in statistics]
    assert everywhere(comm, algorithms[0] == algorithms[1])
    assert agree(comm, snapshot(*(one.module for one in both)))
