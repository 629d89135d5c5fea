"""On fewer or more ranks nothing is lost that the old ones held back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpointing import Training, reseed
from laws import everywhere
from torch import nn

import horovod_sparse as hvs
from horovod_sparse.checkpoint import Checkpoints
from horovod_sparse.checkpoint.reshard import sources


@pytest.mark.parametrize("saved_by", range(1, 9))
@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_old_rank_is_taken_over_once_by_itself_where_it_is_still_there(ranks, saved_by):
    taken = [list(sources(rank, ranks, saved_by)) for rank in range(ranks)]
    assert sorted(old for one in taken for old in one) == list(range(saved_by))
    assert all(taken[rank][0] == rank for rank in range(min(ranks, saved_by)))


@pytest.fixture
def folder(comm, tmp_path):
    return Path(comm.bcast(str(tmp_path)))


@pytest.fixture
def fewer(hvd, comm):
    """All ranks but the last one."""
    ranks = hvd.add_process_set(list(range(comm.Get_size() - 1))) if comm.Get_size() > 1 else None
    yield ranks
    if ranks is not None:
        hvd.remove_process_set(ranks)


class Given(nn.Module):
    """A loss whose gradients are given: loss = sum of parameter times gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(600))

    def gradient(self, rank, step):
        generator = torch.Generator().manual_seed(100 * rank + step)
        return torch.randint(-64, 64, (600,), generator=generator) / 8


def train(model, optimizer, rank, steps, rates):
    """Gives what the gradients of this rank would have moved, had they all been applied."""
    given = 0.0
    for number, rate in zip(steps, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        gradient = model.gradient(rank, number)
        (model.parameter * gradient).sum().backward()
        optimizer.step()
        given += rate * gradient.double().sum().item()
    return given


def owed(optimizer):
    """What this rank's memories hold, as an update."""
    buckets = optimizer.compression_state_dict()["buckets"]
    return sum(bucket["unit"] * bucket["memory"]["residual"].double().sum().item() for bucket in buckets)


def wrap(model, op, ranks):
    return hvs.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        hvs.parse("oktopk:density=0.05,dense_below=0,tau_threshold=2"),
        op=op,
        process_set=ranks,
    )


@pytest.mark.mpi
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("direction", ["fewer", "more"])
def test_every_gradient_is_in_the_parameters_or_in_a_residual(hvd, comm, folder, fewer, op, direction):
    """Across a change of the ranks and of the learning rate, in units of updates."""
    if comm.Get_size() < 3:
        return  # one rank alone exchanges nothing
    rank, operation = comm.Get_rank(), getattr(hvd, op)
    sets = [hvd.global_process_set, fewer] if direction == "fewer" else [fewer, hvd.global_process_set]
    given, moved, notes = 0.0, 0.0, ()
    for phase, ranks in enumerate(sets):
        if ranks.included():
            model = Given()
            optimizer = wrap(model, operation, ranks)
            checkpoints = Checkpoints(folder, process_set=ranks)
            if phase:
                notes = checkpoints.load(model=model, optimizer=optimizer).notes
            factor = 1.0 if op == "Sum" else 1 / ranks.size()
            given += factor * train(model, optimizer, rank, range(4 * phase, 4 * phase + 4), [1.0, 0.5, 0.5, 0.25])
            moved = -model.parameter.detach().double().sum().item()
            if not phase:
                checkpoints.save(4, model=model, optimizer=optimizer)
        comm.Barrier()
    still = owed(optimizer) if sets[1].included() else 0.0
    assert everywhere(comm, np.isclose(comm.bcast(moved) + comm.allreduce(still), comm.allreduce(given)))
    assert everywhere(comm, comm.allreduce(abs(still)) > 0.01)
    said = f"{sets[0].size()} ranks saved it and {sets[1].size()} go on, with the data and buffers of rank 0"
    assert everywhere(comm, not sets[1].included() or said in notes)
    assert everywhere(comm, not sets[1].included() or "thresholds and regions of OkTopk start anew" in notes)


@pytest.mark.mpi
def test_more_ranks_start_with_the_data_of_rank_0_and_seeds_of_their_own(hvd, comm, folder, fewer):
    if comm.Get_size() == 1:
        return
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    compression = "randomk:density=0.1,memory=conef"
    if rank < last:
        run = Training(compression, rank, process_set=fewer).train(3)
        data = {"batch": 3, "rank": rank}
        Checkpoints(folder, process_set=fewer).save(3, **run.states, data=data)
        expected = torch.rand(1).item()
    comm.Barrier()
    grown = Training(compression, rank)
    reseed(1000 + rank)
    restored = Checkpoints(folder).load(**grown.states)
    assert everywhere(comm, restored.data == {"batch": 3, "rank": 0})
    assert everywhere(comm, f"rank {last} is new: generators there keep their seeds" in restored.notes)
    if rank == last:
        torch.manual_seed(1000 + rank)
        expected = torch.rand(1).item()
        torch.manual_seed(1000 + rank)
    assert everywhere(comm, torch.rand(1).item() == expected)
    assert everywhere(comm, grown.scheduler.last_epoch == 3)
    alone = "residuals start empty: the checkpoint was saved by one rank, which exchanges nothing"
    assert everywhere(comm, (alone in restored.notes) == (last == 1))
    grown.train(2)


@pytest.mark.mpi
def test_one_rank_alone_says_that_it_drops_the_residuals(hvd, comm, folder):
    run = Training("topka:density=0.1", comm.Get_rank()).train(2)
    Checkpoints(folder).save(2, **run.states)
    first = hvd.add_process_set([0]) if comm.Get_size() > 1 else hvd.global_process_set
    if comm.Get_rank() == 0:
        alone = Training("topka:density=0.1", 0, process_set=first)
        notes = Checkpoints(folder, process_set=first).load(**alone.states).notes
        assert comm.Get_size() == 1 or "residuals are dropped: one rank alone exchanges nothing" in notes
    comm.Barrier()
    if comm.Get_size() > 1:
        hvd.remove_process_set(first)
