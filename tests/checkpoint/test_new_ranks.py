"""Residuals are preserved when training resumes with another world size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpointing import Training, reseed
from laws import everywhere
from training import Given, owed, sgd, wrap

import horovod_sparse as hvs
from horovod_sparse.checkpoint import Checkpoints

pytestmark = pytest.mark.mpi


@pytest.fixture
def first(hvd, comm):
    """Process sets of the first ranks, by their number."""
    made = {}

    def ranks(number):
        if number == comm.Get_size():
            return hvd.global_process_set
        if number not in made:
            made[number] = hvd.add_process_set(list(range(number)))
        return made[number]

    yield ranks
    comm.Barrier()
    for ranks in made.values():
        hvd.remove_process_set(ranks)


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("direction", ["fewer", "more"])
def test_every_gradient_is_in_the_parameters_or_in_a_residual(hvd, comm, folder, first, op, direction):
    """World size and learning rate change, as when two ranks resume the training of four; residuals are updates."""
    if comm.Get_size() < 3:
        return  # one rank alone exchanges nothing
    rank, operation = comm.Get_rank(), getattr(hvd, op)
    sets = [first(comm.Get_size()), first(2)][:: 1 if direction == "fewer" else -1]
    compression = hvs.parse("oktopk:density=0.05,dense_below=0,tau_threshold=2")
    given, moved, notes = 0.0, 0.0, ()
    for phase, ranks in enumerate(sets):
        if ranks.included():
            model = Given()
            optimizer = wrap(model, compression, sgd(model, lr=1.0, momentum=0), op=operation, process_set=ranks)
            checkpoints = Checkpoints(folder, process_set=ranks)
            if phase:
                notes = checkpoints.load(model=model, optimizer=optimizer).notes
            for step, rate in enumerate([1.0, 0.5, 0.25], start=3 * phase):
                optimizer.param_groups[0]["lr"] = rate
                optimizer.zero_grad()
                model.loss(rank, step).backward()
                optimizer.step()
                given += rate * model.total(rank, step) / (1 if op == "Sum" else ranks.size())
            moved = model.moved()
            if not phase:
                checkpoints.save(3, model=model, optimizer=optimizer)
        comm.Barrier()
    left = owed(optimizer) if sets[1].included() else 0.0
    assert everywhere(comm, np.isclose(comm.bcast(moved) + comm.allreduce(left), comm.allreduce(given)))
    assert everywhere(comm, comm.allreduce(abs(left)) > 0.01)
    said = (
        f"it was saved by {sets[0].size()} ranks and resumes on {sets[1].size()}, with the data and buffers of rank 0"
    )
    assert everywhere(comm, not sets[1].included() or said in notes)
    assert everywhere(comm, not sets[1].included() or "thresholds and regions of OkTopk start from scratch" in notes)


@pytest.mark.parametrize("old", ["one", "all but one"])
def test_new_ranks_get_the_data_of_rank_0_and_separate_seeds(hvd, comm, folder, first, old):
    ranks, rank = comm.Get_size(), comm.Get_rank()
    before = 1 if old == "one" else ranks - 1
    if not 0 < before < ranks:
        return
    compression, expected = "randomk:density=0.1,memory=conef", 0.0
    if rank < before:
        run = Training(compression, rank, process_set=first(before)).train(3)
        data = {"batch": 3, "rank": rank}
        Checkpoints(folder, process_set=first(before)).save(3, **run.states, data=data)
        expected = torch.rand(1).item()
    else:
        first(before)
    comm.Barrier()
    grown = Training(compression, rank)
    reseed(1000 + rank)
    restored = Checkpoints(folder).load(**grown.states)
    assert everywhere(comm, restored.data == {"batch": 3, "rank": 0})
    new = f"rank {before} is" if before == ranks - 1 else f"ranks {before} to {ranks - 1} are"
    assert everywhere(comm, f"{new} new: generators there keep their seeds" in restored.notes)
    if rank >= before:
        torch.manual_seed(1000 + rank)
        expected = torch.rand(1).item()
        torch.manual_seed(1000 + rank)
    assert everywhere(comm, torch.rand(1).item() == expected)
    assert everywhere(comm, grown.scheduler.last_epoch == 3)
    alone = "residuals start empty: it was saved by one rank, which exchanges nothing"
    assert everywhere(comm, (alone in restored.notes) == (before == 1))
    grown.train(1)


@pytest.mark.parametrize("steps", [3, 20], ids=["during the trials", "after them"])
@pytest.mark.parametrize("direction", ["fewer", "more"])
def test_new_ranks_continue_with_the_measured_densities(hvd, comm, folder, first, direction, steps):
    if comm.Get_size() < 3:
        return
    rank, saved = comm.Get_rank(), None
    sets = [first(comm.Get_size()), first(2)][:: 1 if direction == "fewer" else -1]
    compression = hvs.Compression.recommended(
        collective="topka", densities=(1, 0.2, 0.05), trial=2, trial_steps=12, dense_below=0
    )
    for phase, ranks in enumerate(sets):
        if ranks.included():
            model = Given()
            optimizer = wrap(model, compression, sgd(model), process_set=ranks)
            checkpoints = Checkpoints(folder, process_set=ranks)
            if phase:
                checkpoints.load(model=model, optimizer=optimizer)
                (resumed,) = [one["schedule"] for one in optimizer.compression_state_dict()["buckets"]]
            for step in range(20 if phase else steps):
                optimizer.zero_grad()
                model.loss(rank, step).backward()
                optimizer.step()
            (state,) = [one["schedule"] for one in optimizer.compression_state_dict()["buckets"]]
            if not phase:
                checkpoints.save(steps, model=model, optimizer=optimizer)
        saved = saved or comm.bcast(state if rank == 0 else None)
    if sets[1].included():
        assert resumed == saved
        assert state["steps"] == steps + 20
        assert state["state"] == "settled"
        assert state["history"][: len(saved["history"])] == saved["history"]
    found = [one for one in comm.allgather(state if sets[1].included() else None) if one is not None]
    assert everywhere(comm, all(one == found[0] for one in found))


def test_a_single_rank_warns_that_residuals_are_dropped(hvd, comm, folder, first):
    run = Training("topka:density=0.1", comm.Get_rank()).train(2)
    Checkpoints(folder).save(2, **run.states)
    one = first(1)
    if comm.Get_rank() == 0:
        alone = Training("topka:density=0.1", 0, process_set=one)
        notes = Checkpoints(folder, process_set=one).load(**alone.states).notes
        assert comm.Get_size() == 1 or "residuals are dropped: one rank alone exchanges nothing" in notes
