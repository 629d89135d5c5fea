"""What becomes of gradients that were exchanged and not applied: dropped, added to, or refused."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from laws import everywhere
from sharding import exchanged, full, grid, shard
from states import same
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from training import Given, agree, near, owed, settings, sgd, snapshot, wrap

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


class Horovod:
    """A model, its optimizer and its exchange; a subclass for each front end."""

    def __init__(self, comm, compression, make=sgd, model=None, **more):
        self.comm, self.model = comm, model or Given(torch.float64)
        self.optimizer = self.exchange = wrap(self.model, compression, make(self.model), **more)

    def backward(self, *step, scale=1.0, loss=None):
        ((loss or self.model)(*step) * scale).backward()
        self.optimizer.synchronize()

    def step(self, closure=None):
        with self.optimizer.skip_synchronize():
            self.optimizer.step(closure)

    def state(self):
        return self.exchange.compression_state_dict()

    def load(self, state):
        self.exchange.load_compression_state_dict(state)


class DDP(Horovod):
    def __init__(self, comm, compression, make=sgd, model=None, **more):
        self.comm, self.model = comm, model or Given(torch.float64)
        self.optimizer = make(self.model)
        self.replica = DistributedDataParallel(self.model)
        self.exchange = hvs.ddp.SparseState(compression, self.optimizer, **more)
        self.replica.register_comm_hook(self.exchange, hvs.ddp.sparse_hook)

    def backward(self, *step, scale=1.0, loss=None):
        ((loss or self.replica)(*step) * scale).backward()

    def step(self, closure=None):
        self.optimizer.step(closure)

    def state(self):
        return self.exchange.state_dict()

    def load(self, state):
        self.exchange.load_state_dict(state)


class FSDP(DDP):
    def __init__(self, comm, compression, make=sgd, model=None, **more):
        mesh = grid(comm.Get_size(), 1)
        self.comm, self.model = comm, shard(model or Given(torch.float64), mesh["shard"])
        self.optimizer, self.replica = make(self.model), self.model
        self.exchange = exchanged(self.model, mesh, compression, self.optimizer, **more)


FRONT_ENDS = {"Horovod": Horovod, "DDP": DDP, "FSDP": FSDP}


@pytest.fixture(params=FRONT_ENDS)
def front_end(request, hvd, group, comm):
    return partial(FRONT_ENDS[request.param], comm)


def heavy(model):
    return torch.optim.SGD(model if isinstance(model, list) else model.parameters(), 1.0, momentum=0.5)


def plain(model):
    return torch.optim.SGD(model.parameters(), 1.0)


def parameters(model):
    return full(model) if isinstance(model, FSDPModule) else snapshot(model)


@pytest.mark.parametrize(
    ("name", "drop"), [*[(name, "zero_grad") for name in COMPRESSIONS], ("topka", "zeros"), ("recommended", "discard")]
)
def test_exchanged_gradients_that_are_cleared_leave_no_trace(comm, front_end, name, drop):
    ends, rank = [], comm.Get_rank()
    for dropped in (False, True):
        made = front_end(COMPRESSIONS[name], heavy, undoable=True)
        for step in range(12):
            made.optimizer.zero_grad(set_to_none=drop != "zeros")
            if dropped and step % 3 == 1:
                made.backward(rank, 1000 + step, scale=100.0)
                if drop == "discard":
                    made.exchange.discard()
                else:
                    made.optimizer.zero_grad(set_to_none=drop != "zeros")
            made.backward(rank, step)
            made.step()
        ends.append(parameters(made.model))
    assert agree(comm, ends[1])
    assert everywhere(comm, same(*ends))


def test_a_cleared_exchange_that_cannot_be_undone_is_refused_on_every_rank(comm, front_end):
    made = front_end(COMPRESSIONS["recommended"], heavy)
    made.backward(comm.Get_rank(), 0)
    made.optimizer.zero_grad()
    if comm.Get_size() == 1:
        made.backward(0, 1)  # nothing is exchanged
        return
    with pytest.raises(RuntimeError, match=rf"rank {comm.Get_rank()}: .*no_sync.*undoable=True"):
        made.exchange.discard()
    with pytest.raises(RuntimeError, match=rf"rank {comm.Get_rank()}: .*no_sync.*undoable=True"):
        made.backward(comm.Get_rank(), 1)


@pytest.mark.parametrize("undoable", [False, True])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_exchanged_passes_that_add_up_belong_to_one_step(comm, front_end, name, undoable):
    """Over time, the updates are those of the sums, with one decay of the velocity for each step."""
    made, rank, steps, passes = front_end(COMPRESSIONS[name], heavy, undoable=undoable), comm.Get_rank(), 15, 3
    for step in range(steps + 80):
        made.optimizer.zero_grad()
        for number in range(passes):  # hardly any gradients at the end, so that what is owed arrives
            made.backward(rank, step * passes + number, scale=1.0 if step < steps else 1e-12)
        made.step()
    given = Given(torch.float64).total(rank, *range(steps * passes))
    moved = -sum(p.double().sum().item() for p in parameters(made.model))
    expected = comm.allreduce(given) / comm.Get_size() / (1 - 0.5)
    assert agree(comm, parameters(made.model))
    assert everywhere(comm, moved == pytest.approx(expected, rel=1e-5, abs=1e-4))


def test_nothing_is_lost_when_steps_of_several_passes_are_dropped_at_random(comm, front_end):
    made, rank = front_end(COMPRESSIONS["topka"], plain, undoable=True), comm.Get_rank()
    generator, given, number = torch.Generator().manual_seed(1), 0.0, 0
    for _ in range(200):
        passes, applied = torch.randint(1, 4, (), generator=generator), torch.rand((), generator=generator) < 0.6
        made.optimizer.zero_grad()
        for _ in range(passes):
            number += 1
            made.backward(rank, number)
            given += applied.item() * Given().total(rank, number)
        if applied:
            made.step()
    made.optimizer.zero_grad()
    made.exchange.discard()
    moved = -sum(p.double().sum().item() for p in parameters(made.model))
    left = moved + comm.allreduce(owed(made.exchange)) - comm.allreduce(given) / comm.Get_size()
    assert agree(comm, parameters(made.model))
    assert everywhere(comm, abs(left) < 1e-6)


def test_ranks_that_do_not_agree_on_adding_are_named(comm, front_end):
    made, rank = front_end(COMPRESSIONS["topka"], plain, undoable=True), comm.Get_rank()
    made.backward(rank, 0)
    if rank == 0:
        made.optimizer.zero_grad()
    if comm.Get_size() > 1:
        with pytest.raises(RuntimeError, match=rf"{comm.Get_size() - 1} of {comm.Get_size()} ranks have added"):
            made.backward(rank, 1)


@pytest.mark.parametrize("change", ["clipped", "one cleared"])
def test_adding_to_gradients_that_were_changed_is_refused(comm, front_end, change):
    made, rank = front_end(COMPRESSIONS["recommended"], plain), comm.Get_rank()
    made.backward(rank, 0)
    first = next(made.model.parameters())
    if change == "clipped":
        first.grad.mul_(0.5)
    else:
        first.grad = None
    if comm.Get_size() > 1:
        with pytest.raises(RuntimeError, match=f"rank {rank}: .* cleared"):
            made.backward(rank, 1)


def test_momentum_of_the_compression_refuses_passes_that_add_up(comm, front_end):
    own = hvs.Compression.topka(memory="momentum", momentum=0.9, **settings())
    made, rank = front_end(own, plain), comm.Get_rank()
    made.backward(rank, 0)
    if comm.Get_size() > 1:
        with pytest.raises(RuntimeError, match=rf"rank {rank}: .*momentum of its own.*no_sync"):
            made.backward(rank, 1)


def test_a_closure_uses_the_result_of_each_evaluation(comm, front_end):
    """As a line search does; results are not dropped when the closure clears them."""
    made, rank = front_end(COMPRESSIONS["dense"], lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3)), 0
    del rank

    def closure():
        made.optimizer.zero_grad()
        loss = sum(p.square().sum() + p.sum() for p in made.model.parameters())
        loss.backward()
        return loss

    made.optimizer.step(closure)
    ends = parameters(made.model)
    assert everywhere(comm, near(ends, [torch.full_like(p, -0.5) for p in ends], 1e-3))


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
        state = hvs.ddp.SparseState(COMPRESSIONS["recommended"], optimizers, undoable=True)
        replica = DistributedDataParallel(model)
        replica.register_comm_hook(state, hvs.ddp.sparse_hook)
        for step in range(40):
            replica.zero_grad()
            replica(comm.Get_rank(), step, both).backward()
            optimizers[step % 2].step()
        ends.append(snapshot(model))
    assert agree(comm, ends[1])
    assert everywhere(comm, same(*ends))


def test_reset_forgets_the_training_so_far(comm, front_end):
    rank, ends = comm.Get_rank(), []
    for abandoned in (0, 7):
        made = front_end(COMPRESSIONS["oktopk"], heavy)
        start = copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict()))
        for step in range(abandoned):
            made.optimizer.zero_grad()
            made.backward(rank, 1000 + step)
            made.step()
        made.model.load_state_dict(start[0])
        made.optimizer.load_state_dict(start[1])
        made.exchange.reset()
        for step in range(10):
            made.optimizer.zero_grad()
            made.backward(rank, step)
            made.step()
        ends.append(parameters(made.model))
    assert everywhere(comm, same(*ends))


@pytest.mark.parametrize("remedy", [None, "load", "reset", "same step"])
def test_an_optimizer_that_goes_back_alone_is_reported_once(comm, front_end, caplog, remedy):
    made, rank = front_end(COMPRESSIONS["recommended"], heavy), comm.Get_rank()
    saved = copy.deepcopy(made.optimizer.state_dict())
    for step in range(6):
        made.optimizer.zero_grad()
        made.backward(rank, step)
        made.step()
        if step == 1:
            saved, state = copy.deepcopy(made.optimizer.state_dict()), made.state()
        if step > 2:
            made.optimizer.load_state_dict(made.optimizer.state_dict() if remedy == "same step" else saved)
        if remedy == "load" and step > 2:
            made.load(state)
        elif remedy == "reset" and step > 2:
            made.exchange.reset()
    reports = [one for one in caplog.records if "the optimizer has loaded a state of another step" in one.getMessage()]
    assert everywhere(comm, len(reports) == (comm.Get_size() > 1 and remedy is None))
