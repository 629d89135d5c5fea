"""Laws of local steps: the correct mean, nothing lost, the same parameters on every rank."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import everywhere, examples
from states import same
from training import (
    MEAN,
    Given,
    agree,
    conserved,
    mlp,
    settings,
    sgd,
    snapshot,
    train,
    wrap,
    wrap_local,
)

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))
SPECS = [
    "topka:density=0.05",
    "gtopk:density=0.05",
    "oktopk:density=0.05,tau_partition=2,tau_threshold=2",
    "stable:density=0.25,block=4,refresh=2",
    "topka:density=1.0",
    "dense:dense_steps=0",
]
OUTER = [MEAN, hvs.OuterSGD(), hvs.OuterSGD(lr=0.5, nesterov=False)]


def parse(spec):
    return hvs.parse(f"{spec},dense_below=0,bucket_bytes=1200")


class Exact(Given):
    """Gradients whose means over the ranks are exact, too."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    def gradients(self, rank, step):
        return [self.ranks * gradient for gradient in super().gradients(rank, step)]


@pytest.mark.parametrize("spec", SPECS)
def test_rounds_of_one_step_are_bitwise_identical_to_the_distributed_optimizer(hvd, comm, spec):
    """Where sums are exact; a learning rate that is a power of two scales residuals and thresholds without rounding."""
    rank, ends = comm.Get_rank(), []
    for wrapper in (wrap, partial(wrap_local, local_steps=1)):
        model = Exact(comm.Get_size())
        optimizer = wrapper(model, parse(spec), sgd(model, lr=0.25, momentum=0))
        ends.append(train(optimizer, model, rank, range(20), Given.loss))
    assert everywhere(comm, same(*ends))
    assert agree(comm, ends[1])


@examples(12)
@given(spec=st.sampled_from(SPECS), seed=st.integers(0, 2**31), rounds=st.integers(1, 6))
def test_nothing_is_lost_for_any_numbers_of_steps_per_rank(hvd, comm, spec, seed, rounds):
    """None at all, too, on some of them or on all; the learning rate changes: what has moved is an update already."""
    rank, model, moved = comm.Get_rank(), Given(), 0.0
    counts = np.random.default_rng(seed).integers(0, 4, (rounds, comm.Get_size()))
    optimizer = wrap_local(model, parse(spec), sgd(model, lr=0.5, momentum=0))
    for number in range(rounds):
        steps = range(4 * number, 4 * number + counts[number, rank])
        rate = optimizer.param_groups[0]["lr"] = (0.5, 0.25, 1.0)[number % 3]
        moved += rate * model.total(rank, *steps)
        train(optimizer, model, rank, steps, Given.loss)
        optimizer.synchronize()
        assert agree(comm, snapshot(model))
    assert conserved(comm, model, optimizer, moved, 0.02)


@pytest.mark.parametrize("outer", [OUTER[1], pytest.param(MEAN, marks=pytest.mark.full)], ids=["DiLoCo", "mean"])
@pytest.mark.parametrize("spec", [*SPECS, "randomk:density=0.1", "hierarchical:density=0.1,node_ranks=2"])
def test_parameters_are_identical_after_a_round_and_differ_within(hvd, comm, spec, outer):
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, parse(spec), sgd(model, momentum=0.9), outer=outer)
    for number in range(5):
        start = snapshot(model)
        train(optimizer, model, rank, range(4 * number, 4 * number + 3))
        assert everywhere(comm, optimizer.local_step == 3)
        assert comm.Get_size() == 1 or not agree(comm, snapshot(model))
        train(optimizer, model, rank, [4 * number + 3])
        assert everywhere(comm, optimizer.local_step == 0)
        assert agree(comm, snapshot(model))
        assert everywhere(comm, not same(snapshot(model), start))


@pytest.mark.parametrize("where", ["on all ranks", "on rank 0"])
def test_a_frozen_parameter_does_not_move(hvd, comm, where):
    """On all ranks alike: momentum does not move it. On one: it follows the others, and its residual waits."""
    rank, ranks, model = comm.Get_rank(), comm.Get_size(), mlp()
    optimizer = wrap_local(model, None, sgd(model, momentum=0), outer=hvs.OuterSGD())
    train(optimizer, model, rank, range(8))
    frozen = model[2].weight
    before = frozen.detach().clone()
    frozen.requires_grad_(where == "on rank 0" and rank > 0)
    frozen.grad = None
    train(optimizer, model, rank, range(8, 16))
    moves = where == "on rank 0" and ranks > 1
    assert everywhere(comm, torch.equal(before, frozen) != moves)
    frozen.requires_grad_(True)
    train(optimizer, model, rank, range(16, 20))
    assert everywhere(comm, not torch.equal(before, frozen))
    assert agree(comm, snapshot(model))


def test_a_parameter_frozen_within_a_round_keeps_its_earlier_steps(hvd, comm):
    rank, model = comm.Get_rank(), Given()
    optimizer = wrap_local(model, EVERYTHING, sgd(model, lr=1.0, momentum=0))
    train(optimizer, model, rank, range(2), Given.loss)
    model.second.requires_grad_(False)
    model.second.grad = None
    train(optimizer, model, rank, range(2, 4), Given.loss)
    assert agree(comm, snapshot(model))
    mine = sum(model.gradients(rank, step)[1].double().sum().item() for step in range(2))
    moved = -model.second.double().sum().item()
    assert everywhere(comm, moved == pytest.approx(comm.allreduce(mine) / comm.Get_size(), abs=1e-3))


def test_a_parameter_unfrozen_on_any_rank_takes_part(hvd, comm):
    rank, model = comm.Get_rank(), mlp()
    model[0].requires_grad_(False)
    optimizer = wrap_local(model, EVERYTHING)
    train(optimizer, model, rank, range(6))
    before = snapshot(model[0])
    model[0].requires_grad_(rank == comm.Get_size() - 1)  # in the middle of a round
    train(optimizer, model, rank, range(6, 8))
    assert agree(comm, snapshot(model))
    assert everywhere(comm, not any(map(torch.equal, snapshot(model[0]), before)))
    assert everywhere(comm, comm.Get_size() == 1 or len(optimizer.exchange.fragments[0].exchange.worker.buckets) > 1)


def test_a_round_can_end_early(hvd, comm):
    """Though they have taken different numbers of steps; where none has taken any, nothing is sent."""
    rank, model = comm.Get_rank(), Given()
    optimizer = wrap_local(model, EVERYTHING, sgd(model, lr=1.0, momentum=0), outer=hvs.OuterSGD(1, 0.5))
    train(optimizer, model, rank, range(rank % 3), Given.loss)
    optimizer.synchronize()
    assert agree(comm, snapshot(model))
    assert conserved(comm, model, optimizer, 1.5 * model.total(rank, *range(rank % 3)))
    after, sent = snapshot(model), optimizer.traffic.bytes_sent
    optimizer.synchronize()
    assert everywhere(comm, same(snapshot(model), after) and optimizer.traffic.bytes_sent == sent)


def test_different_initial_parameters_are_reported(hvd, comm):
    rank, model = comm.Get_rank(), mlp()
    if comm.Get_size() == 1:
        return
    with torch.no_grad():
        model[2].bias[1] += rank
    optimizer = wrap_local(model)
    local = train(optimizer, model, rank, range(3))
    with pytest.raises(ValueError, match=rf"rank {rank}: start of the first round.*broadcast_parameters.*2\.bias"):
        train(optimizer, model, rank, [3])
    assert everywhere(comm, not torch.equal(local[0], model[0].weight))  # the last step was taken, nothing else
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def test_parameters_of_half_and_double_precision_and_of_any_layout(hvd, comm):
    rank = comm.Get_rank()
    for dtype in (torch.float64, torch.bfloat16):
        model = mlp(dtype)
        model[2].weight.data = model[2].weight.data.t().contiguous().t()
        train(wrap_local(model, outer=hvs.OuterSGD()), model, rank, range(8))
        assert agree(comm, snapshot(model))
        assert everywhere(comm, all(p.isfinite().all() for p in model.parameters()))


def test_a_bucket_is_sent_once_a_round(hvd, comm):
    """An H-th of the bytes, and of the messages, of an exchange in every step."""
    rank, sent = comm.Get_rank(), []
    for local_steps in (1, 8):
        model = mlp()
        plain = hvs.Compression.topka(**settings(indices="plain"))  # coded, they take more bytes or fewer
        optimizer = wrap_local(model, plain, local_steps=local_steps)
        train(optimizer, model, rank, range(16))
        assert everywhere(comm, comm.Get_size() == 1 or optimizer.statistics()["total/steps"] == 16 // local_steps)
        sent.append((optimizer.traffic.bytes_sent, optimizer.traffic.messages_sent))
    (every_byte, every_message), (some_bytes, some_messages) = sent
    assert everywhere(comm, 8 * some_bytes == every_byte)
    # The first exchange does not know the lengths, and takes a message round more.
    assert everywhere(comm, comm.Get_size() == 1 or every_message / 8 < some_messages < every_message / 5)


def test_a_process_set_trains_separately(hvd, comm):
    rank = comm.Get_rank()
    halves = comm.Split(rank % 2)
    model = mlp()
    train(wrap_local(model, process_set=halves), model, rank, range(4))
    assert agree(halves, snapshot(model))
    assert comm.Get_size() == 1 or not agree(comm, snapshot(model))
