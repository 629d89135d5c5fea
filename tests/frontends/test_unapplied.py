"""What becomes of gradients that were exchanged and not applied: dropped, added to, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from combinations import halved
from laws import everywhere
from sharding import exchanged, grid, shard
from states import same
from torch.nn.parallel import DistributedDataParallel
from training import Given, agree, near, owed, settings, snapshot

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

MOMENTUM = hvs.Compression.recommended(collective="topka", wire="float32", **settings())
COMPRESSIONS = {
    "topka": hvs.Compression.topka(**settings()),
    "recommended": MOMENTUM,
    "oktopk": hvs.Compression.recommended(collective="oktopk", tau_partition=2, tau_threshold=2, **settings()),
    "without limit": hvs.Compression.recommended(collective="topka", limit=None, **settings()),
    "dense": hvs.Compression.recommended(collective="topka", wire="float32", **settings(density=1.0)),
}


every = pytest.mark.parametrize("front_end", ["Horovod", "DDP", "FSDP2"], indirect=True)
of_ddp = pytest.mark.parametrize("front_end", ["DDP"], indirect=True)


def heavy(parameters):
    return torch.optim.SGD(parameters, 1.0, momentum=0.5)


def made(front_end, name, make=heavy, **more):
    """Return a training of ``Given``."""

    def model():
        return Given(torch.float64)

    return front_end.training(COMPRESSIONS[name], make=lambda model, _: [make(model.parameters())], model=model, **more)


def exchange(training, step, scale=1.0):
    """Compute and exchange gradients."""
    (training.model(training.front_end.rank, step) * scale).backward()
    return training.front_end.reduced(training)


def plain(parameters):
    return torch.optim.SGD(parameters, 1.0)


def moved(training):
    return sum(training.moved().values())


@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_an_optimizer_that_was_not_given_is_found_by_its_steps(comm, group, kind):
    """An update by hand is no step of an optimizer: every exchange then counts."""
    model, mesh, rank = Given(), grid(comm.Get_size(), 1), comm.Get_rank()
    if kind == "FSDP":
        replica = model = shard(model, mesh["shard"])
        exchanged(model, mesh, COMPRESSIONS["topka"], None)
    else:
        replica = DistributedDataParallel(model)
        state = hvs.ddp.SparseState(COMPRESSIONS["topka"], None, model.named_parameters())
        replica.register_comm_hook(state, hvs.ddp.sparse_hook)
    for step in range(3):  # by hand
        replica.zero_grad()
        replica(rank, step).backward()
    optimizer = plain(model.parameters())
    optimizer.step()
    replica(rank, 3).backward()
    replica.zero_grad()
    if comm.Get_size() > 1:
        with pytest.raises(RuntimeError, match=rf"rank {rank}: .*cleared without a step"):
            replica(rank, 4).backward()


@of_ddp
@pytest.mark.parametrize(("name", "undoable"), halved(COMPRESSIONS, [False, True]))
def test_exchanged_passes_that_add_up_belong_to_one_step(comm, front_end, name, undoable):
    """Over time, the updates are those of the sums, with one decay of the velocity for each step."""
    training, steps, passes = made(front_end, name, undoable=undoable), 15, 3
    for step in range(steps + 80):
        training.zero_grad()
        for number in range(passes if step < steps else 1):  # hardly any at the end, so that what is owed arrives
            exchange(training, step * passes + number, scale=1.0 if step < steps else 1e-12)
        training.step()
    given = Given(torch.float64).total(front_end.rank, *range(steps * passes))
    expected = comm.allreduce(given) / comm.Get_size() / (1 - 0.5)
    assert agree(comm, training.parameters().values())
    assert front_end.everywhere(moved(training) == pytest.approx(expected, rel=1e-5, abs=1e-4))


@pytest.mark.parametrize("front_end", ["DDP", "FSDP2"], indirect=True)
@pytest.mark.parametrize("undoable", [False, True])
def test_results_may_be_cleared_after_a_pass_that_adds_to_them_without_an_exchange(front_end, undoable):
    ends = []

    def drop(training, step):
        exchange(training, 1000 + step)
        with front_end.accumulating(training, False):
            (training.model(front_end.rank, step) * 0).backward()  # FSDP keeps what it accumulates
        training.zero_grad()
        front_end.accumulating(training, True)

    for dropped in (False, True):
        training = made(front_end, "topka", plain, undoable=undoable)
        for step in range(12):
            if dropped and step % 3 == 1:
                drop(training, step)
                if not undoable and front_end.ranks > 1:
                    with pytest.raises(RuntimeError, match="cleared without a step"):
                        exchange(training, step)
                    return
            with exchange(training, step):
                training.step()
            training.zero_grad()
        ends.append(training.parameters())
    assert front_end.everywhere(same(*ends))


@every
def test_nothing_is_lost_when_steps_of_several_passes_are_dropped_at_random(comm, front_end):
    training = made(front_end, "topka", plain, undoable=True)
    generator, given, number = torch.Generator().manual_seed(1), 0.0, 0
    for _ in range(80):
        passes, applied = torch.randint(1, 4, (), generator=generator), torch.rand((), generator=generator) < 0.6
        training.zero_grad()
        for _ in range(passes):
            number += 1
            reduced = exchange(training, number)
            given += applied.item() * Given().total(front_end.rank, number)
        if applied:
            with reduced:
                training.step()
    training.zero_grad()
    training.exchange.discard()
    left = moved(training) + comm.allreduce(owed(training.exchange)) - comm.allreduce(given) / comm.Get_size()
    assert agree(comm, training.parameters().values())
    assert front_end.everywhere(abs(left) < 1e-6)


@every
def test_ranks_that_do_not_agree_on_adding_are_named(front_end):
    training = made(front_end, "topka", plain, undoable=True)
    exchange(training, 0)
    if front_end.rank == 0:
        training.zero_grad()
    if front_end.ranks > 1:
        with pytest.raises(RuntimeError, match=rf"{front_end.ranks - 1} of {front_end.ranks} ranks have added"):
            exchange(training, 1)


@every
@pytest.mark.filterwarnings("ignore:.*LBFGS estimates curvature:UserWarning")
@pytest.mark.parametrize("spec", ["dense", "topka"])
def test_a_closure_uses_the_result_of_each_evaluation(comm, front_end, spec):
    """As a line search does; results are not dropped when the closure clears them, in the first step, either."""
    training = made(front_end, spec, lambda parameters: torch.optim.LBFGS(parameters, max_iter=3))

    def closure():
        training.zero_grad()
        loss = sum(p.square().sum() + p.sum() for p in training.module.parameters())
        loss.backward()
        return loss

    training.optimizer.step(closure)
    ends = training.parameters().values()
    assert agree(comm, ends)
    assert front_end.everywhere(spec == "topka" or near(ends, [torch.full_like(p, -0.5) for p in ends], 1e-3))


class Alternating(Given):
    """Model whose parameters are trained in turns; the loss fills the gradients of both, or of one."""

    def forward(self, rank, step, both):
        parts = zip(self.parameters(), self.gradients(rank, step), strict=True)
        return sum((p * g).sum() * (both or number == step % 2) for number, (p, g) in enumerate(parts))


def test_of_two_optimizers_the_one_that_steps_applies_its_own_results(comm, group):
    """As in a GAN whose losses fill all gradients."""
    ends = []
    for both in (False, True):
        model = Alternating(torch.float64)
        optimizers = [heavy([p]) for p in model.parameters()]
        state = hvs.ddp.SparseState(COMPRESSIONS["recommended"], optimizers, model.named_parameters(), undoable=True)
        replica = DistributedDataParallel(model)
        replica.register_comm_hook(state, hvs.ddp.sparse_hook)
        for step in range(40):
            replica.zero_grad()
            replica(comm.Get_rank(), step, both).backward()
            optimizers[step % 2].step()
        ends.append(snapshot(model))
    assert agree(comm, ends[1])
    assert everywhere(comm, same(*ends))


@every
@pytest.mark.parametrize("remedy", [None, "load", "reset", "same step"])
def test_an_optimizer_that_goes_back_alone_is_reported_once(front_end, caplog, remedy):
    training = made(front_end, "recommended")
    optimizer = training.optimizer
    for step in range(6):
        with exchange(training, step):
            training.step()
        training.zero_grad()
        if step == 1:
            saved, (state,) = copy.deepcopy(optimizer.state_dict()), training.states()
        if step > 2:
            optimizer.load_state_dict(optimizer.state_dict() if remedy == "same step" else saved)
        if remedy == "load" and step > 2:
            front_end.load(training.exchange, state)
        elif remedy == "reset" and step > 2:
            training.exchange.reset()
    reports = [one for one in caplog.records if "the optimizer has loaded a state of another step" in one.getMessage()]
    assert front_end.everywhere(len(reports) == (front_end.ranks > 1 and remedy is None))
