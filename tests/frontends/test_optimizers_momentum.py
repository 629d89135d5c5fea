"""Momentum of the optimizer, applied by the memory: at density 1 it is torch's, and the script sees no difference."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from combinations import halved
from front_ends import start
from laws import everywhere
from states import same
from torch import nn
from training import WHOLE, Given, adamw, agree, closure_of, loss_of, mlp, near, sgd, snapshot, train, wrap

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(memory="momentum", **WHOLE)


def adam(model, **settings):
    return torch.optim.Adam(model.parameters(), **{"lr": 0.0, **settings})


def falling(step):
    """Return a learning rate with a warm-up from 0 and two sudden drops."""
    return 0.004 * step if step < 5 else 0.02 / (1, 10, 3)[step // 20 % 3]


def train_with(comm, model, optimizer, steps, rate=lambda step: 0.02, loss=loss_of, change=lambda *_: None):
    """Train with a learning rate and other changes of the optimizer's settings in each step."""
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        change(optimizer, step)
        train(optimizer, model, comm.Get_rank(), [step], loss)


def shape_of(state):
    """A state_dict with shapes in the place of tensors."""
    if isinstance(state, dict):
        return {key: shape_of(value) for key, value in state.items()}
    if isinstance(state, list):
        return [shape_of(value) for value in state]
    return tuple(state.shape) if isinstance(state, torch.Tensor) else state


def cycled(optimizer, step):
    """What OneCycleLR does to the momentum; now and then there is none."""
    momentum = 0.95 - 0.01 * (step % 11)
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (momentum, 0.99)
        else:
            group["momentum"] = 0.0 if step % 50 == 49 and not group["nesterov"] else momentum


COUPLED = {"weight_decay": 0.05}
CASES = [
    pytest.param("Horovod", sgd, {}, id="SGD"),
    pytest.param("Horovod", sgd, {"nesterov": True, **COUPLED}, id="nesterov", marks=pytest.mark.full),
    pytest.param(
        "Horovod", sgd, {"dampening": 0.2, "maximize": True, **COUPLED}, id="dampening", marks=pytest.mark.full
    ),
    pytest.param("DDP", sgd, {"dampening": 0.2, "fused": True, **COUPLED}, id="DDP", marks=pytest.mark.slow),
    pytest.param("Horovod", adamw, {"maximize": True}, id="AdamW"),
    pytest.param("Horovod", adam, {"amsgrad": True}, id="Adam", marks=pytest.mark.full),
    pytest.param("DDP", adam, COUPLED, id="DDP-Adam", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("front_end", "make", "settings"), CASES)
def test_at_density_1_training_equals_torchs_optimizer(hvd, group, comm, front_end, make, settings):
    """Whatever learning rate and momentum do, for parameters of every size, and so are state and settings."""
    sign = -1 if settings.get("maximize") else 1
    given = {"rate": falling, "loss": lambda *at: sign * loss_of(*at), "steps": 60, "change": cycled}
    model, ours = mlp(torch.float64), mlp(torch.float64)
    stock = start("stock", model, lambda _: make(model, **settings), None)
    started = start(front_end, ours, lambda _: make(ours, **settings), EVERYTHING)
    for one in (stock, started):
        train_with(comm, one.model, one.optimizer, **given)
    assert everywhere(comm, near(snapshot(ours), snapshot(model), 1e-8))
    assert agree(comm, snapshot(ours))
    assert everywhere(comm, shape_of(started.optimizer.state_dict()) == shape_of(stock.optimizer.state_dict()))


if hasattr(torch.optim, "Muon"):  # since torch 2.9

    def test_at_density_1_muon_applies_its_own_momentum(hvd, group, comm):
        """It orthogonalizes in bfloat16, so that rounding shows."""
        rank, results = comm.Get_rank(), []
        for compression in (None, hvs.Compression.topka(memory="momentum", density=1.0, dense_below=0)):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 4, bias=False))
            optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
            replica = nn.parallel.DistributedDataParallel(model)
            if compression is not None:
                state = hvs.ddp.SparseState(compression, optimizer, model.named_parameters())
                replica.register_comm_hook(state, hvs.ddp.sparse_hook)
            results.append(train(optimizer, replica, rank, range(20)))
        assert everywhere(comm, near(*results, 0.02))
        assert agree(comm, results[1])


def test_the_optimizers_settings_are_restored_after_each_step(hvd, comm, caplog):
    """Between steps, in a step's closure, and after a step that failed; OneCycleLR finds and changes them."""
    model, rank, seen = mlp(), comm.Get_rank(), []
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        optimizer = wrap(model, hvs.Compression.recommended(dense_below=100), sgd(model, weight_decay=0.05))
    assert everywhere(comm, ("m of SGD has the form 0.6 u + 0.4 / (1 - m) g" in caplog.text) == (rank == 0))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    def closure():
        seen.append(optimizer.param_groups[0]["momentum"])
        return closure_of(optimizer, model, rank, len(seen))()

    for _ in range(10):
        optimizer.step(closure)
        seen.append(optimizer.param_groups[0]["momentum"])
        scheduler.step()
    assert everywhere(comm, seen[::2] == seen[1::2])
    assert everywhere(comm, len(set(seen)) == 10)
    optimizer.param_groups[0]["lr"] = "no number"
    closure()
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step(closure)
    assert everywhere(comm, optimizer.param_groups[0]["momentum"] == seen[-1])


# --- the state ---


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_state_of_the_plain_optimizer_continues(hvd, group, comm, make):
    """SGD's as if it had been wrapped from the beginning; on rank 0, from which the others get it."""
    model, settings = mlp(torch.float64), {"weight_decay": 0.05}
    stock = start("stock", model, lambda _: make(model, **settings), None)
    train_with(comm, stock.model, stock.optimizer, steps=20)
    ours = mlp(torch.float64)
    wrapped = wrap(ours, EVERYTHING, make(ours, **settings))
    if comm.Get_rank() == 0:
        wrapped.load_state_dict(copy.deepcopy(stock.optimizer.state_dict()))
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    assert everywhere(comm, same(shape_of(wrapped.state_dict()), shape_of(stock.optimizer.state_dict())))
    ours.load_state_dict(model.state_dict())
    again = {"loss": lambda replica, rank, step: loss_of(replica, rank, step + 20), "steps": 20}
    train_with(comm, stock.model, stock.optimizer, **again)
    train_with(comm, ours, wrapped, **again)
    assert everywhere(comm, near(snapshot(ours), snapshot(model), 1e-8))


SELECTED = hvs.Compression.recommended(collective="topka", density=0.05, dense_below=0)


def muon(model, **settings):
    return torch.optim.Muon(model.parameters(), **settings)


MUONS = [pytest.param(muon, marks=pytest.mark.full)] if hasattr(torch.optim, "Muon") else []


@pytest.mark.parametrize("make", [sgd, adamw, *MUONS])
def test_the_state_of_the_optimizer_holds_the_velocity_of_the_rank(hvd, group, comm, make):
    """Without a collective call, as a script calls it on rank 0 alone; and it changes nothing."""
    rank, results = comm.Get_rank(), []
    for looks, front_end in ((True, "Horovod"), (False, "Horovod"), (True, "DDP")):
        model = Given(torch.float64)
        model.first = nn.Parameter(model.first.detach().view(30, 10))  # a matrix, as Muon takes no others
        started = start(front_end, model, lambda _: make(model, lr=0.01), SELECTED)  # noqa: B023
        optimizer = started.optimizer
        velocities = [torch.zeros_like(p) for p in model.parameters()]
        beta, share = {sgd: (0.9, 1.0), adamw: (0.9, 0.1), muon: (0.95, 0.05)}[make]
        for step in range(40):
            train(optimizer, started.model, rank, [step], given_loss)
            for velocity, gradient in zip(velocities, model.gradients(rank, step), strict=True):
                velocity.mul_(beta).add_(gradient, alpha=share)
            if looks and (step % 7 == 0 or step == 39) and comm.Get_size() > 1:
                found = optimizer.state_dict()["state"].values()
                name, expected = "exp_avg" if make is adamw else "momentum_buffer", velocities
                if make is adamw:  # steps of Adam would be too long where nothing has arrived yet
                    expected = [
                        torch.clamp(v, -most, most) for v, most in zip(velocities, map(longest, found), strict=True)
                    ]
                assert near([state[name] for state in found], expected)
        results.append(snapshot(model))
    assert everywhere(comm, same(results[0], results[1]))
    assert everywhere(comm, near(results[0], results[2]))


def longest(state):
    """First moments with which AdamW's next step is as long as the learning rate."""
    steps = float(state["step"])
    return (state["exp_avg_sq"] / (1 - 0.999**steps)).sqrt() * (1 - 0.9**steps)


@pytest.mark.parametrize("after", [3, 30])
def test_a_plain_adamw_continues_with_bounded_steps(hvd, comm, after):
    """Also where nothing was delivered yet."""
    model, rank = Given(torch.float64), comm.Get_rank()
    optimizer = wrap(model, SELECTED, adamw(model, lr=0.01))
    train(optimizer, model, rank, range(after), Given.loss)
    plain = Given(torch.float64)
    plain.load_state_dict(model.state_dict())
    resumed = adamw(plain, weight_decay=0.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = snapshot(plain)
    train(resumed, plain, rank, [after], nothing)
    moved = torch.cat([(now - one).flatten() for now, one in zip(snapshot(plain), before, strict=True)]).abs()
    assert everywhere(comm, 0.005 < moved.max() <= 0.0101)
    assert everywhere(comm, (moved > 0).any())


def given_loss(replica, rank, step):
    """The loss of ``Given``, in which only gradients of the rank occur."""
    return replica(rank, step) if isinstance(replica, nn.parallel.DistributedDataParallel) else replica.loss(rank, step)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize(("trained", "to"), [("ours", "ours"), ("ours", "torch"), ("torch", "ours")])
def test_an_unchanged_script_resumes_with_momentum(hvd, comm, trained, to, nesterov):
    """From a state of rank 0, without the state of the exchange: all of it is delivered, if no gradients follow."""
    rank, models, optimizers = comm.Get_rank(), [], []
    for kind in (trained, to):
        models.append(Given(torch.float64))
        optimizer = sgd(models[-1], lr=1.0, nesterov=nesterov)
        optimizers.append(wrap(models[-1], SELECTED, optimizer) if kind == "ours" else optimizer)
    train(optimizers[0], models[0], rank, range(30), Given.loss)
    state = comm.bcast(optimizers[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(state))
    momentum = sum(one["momentum_buffer"].sum().item() for one in state["state"].values())
    train(optimizers[1], models[1], rank, range(200), lambda model, rank, step: 0 * model.loss(rank, 0))
    assert everywhere(comm, momentum != 0)
    assert everywhere(comm, models[1].moved() == pytest.approx((8.1 if nesterov else 9) * momentum, rel=1e-6))


@pytest.mark.parametrize(("front_end", "wrapped"), halved(["Horovod", "DDP"], [False, True]))
def test_momentum_of_each_rank_that_is_loaded_before_the_first_step_becomes_the_mean(
    hvd, group, comm, front_end, wrapped
):
    """Then the ranks agree, and all of it is delivered, if no gradients follow."""
    rank, trained, model = comm.Get_rank(), Given(torch.float64), Given(torch.float64)
    started = start(front_end, trained, lambda _: sgd(trained, lr=1.0), SELECTED)
    train(started.optimizer, started.model, rank, range(30), given_loss)
    state = copy.deepcopy(started.optimizer.state_dict())
    momentum = comm.allreduce(sum(one["momentum_buffer"].sum().item() for one in state["state"].values()))
    plain = sgd(model, lr=1.0)
    if not wrapped:
        plain.load_state_dict(state)
    resumed = start(front_end, model, lambda _: plain, SELECTED)
    if wrapped:
        resumed.optimizer.load_state_dict(state)
    train(resumed.optimizer, resumed.model, rank, range(200), lambda *at: 0 * given_loss(*at))
    assert agree(comm, snapshot(model))
    assert everywhere(comm, model.moved() == pytest.approx(9 * momentum / comm.Get_size(), rel=1e-6))


def test_the_state_may_be_read_between_micro_batches_but_not_during_an_exchange(hvd, comm):
    model, rank, states = Given(torch.float64), comm.Get_rank(), []
    optimizer = wrap(model, SELECTED, sgd(model), backward_passes_per_step=2)
    for step in range(10):
        optimizer.zero_grad()
        model.loss(rank, 2 * step).backward()
        states.append(copy.deepcopy(optimizer.state_dict()["state"]))
        model.loss(rank, 2 * step + 1).backward()
        if comm.Get_size() > 1:
            with pytest.raises(RuntimeError, match=rf"rank {rank}: .* during an exchange.*after step\(\)"):
                optimizer.state_dict()
        optimizer.step()
        states.append(copy.deepcopy(optimizer.state_dict()["state"]))
    assert everywhere(comm, all(same(*pair) for pair in zip(states[1:-1:2], states[2::2], strict=True)))


# --- optimizers whose momentum stays theirs ---


def test_unsupported_momentum_is_applied_after_the_selection(hvd, comm, caplog):
    """As with the residual, and rank 0 says so; where there is none, there is nothing to say."""
    results = []
    for memory in ("residual", "momentum"):
        model = mlp()
        of_torch = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)
        with caplog.at_level(logging.WARNING, "horovod_sparse"):
            compression = hvs.Compression.topka(density=0.05, dense_below=100, memory=memory)
            optimizer = wrap(model, compression, of_torch)
        assert everywhere(comm, ("momentum of RMSprop" in caplog.text) == (memory == "momentum" and comm.rank == 0))
        train_with(comm, model, optimizer, steps=5)
        results.append(snapshot(model))
    assert everywhere(comm, same(*results))
    caplog.clear()
    wrap(model := mlp(), compression, torch.optim.RMSprop(model.parameters()))
    assert everywhere(comm, not caplog.text)


# --- what goes wrong, and what scripts do with states ---


@pytest.mark.parametrize("kind", ["join", "join at once", "own states", "rank 0"])
def test_ranks_agree_after_momentum_was_replaced(hvd, comm, kind):
    """By a broadcast after hvd.join(), and by a state that is loaded, after which some ranks join at once.

    Each rank loads a state of its own, or rank 0 loads one and broadcasts it.
    """
    model, rank = mlp(torch.float64), comm.Get_rank()
    optimizer = wrap(model, SELECTED, sgd(model))
    train(optimizer, model, rank, range(10))
    state = copy.deepcopy(optimizer.state_dict())
    last = comm.Get_size() - 1 if kind == "join" else 0  # who has made the most steps
    train(optimizer, model, rank, range(10, 20 + 3 * rank * (kind == "join")))
    if kind == "join at once":
        optimizer.load_state_dict(state)
        train(optimizer, model, rank, range(20, 20 + 3 * (rank == 0)))
    if "join" in kind:
        hvd.join()
        pipelines = [bucket.pipeline for bucket in optimizer._exchange.worker.buckets] if comm.Get_size() > 1 else []
        assert everywhere(comm, not any(getattr(one, "replaced", False) for one in pipelines))  # once is enough
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    if kind == "own states" or (kind == "rank 0" and rank == 0):
        optimizer.load_state_dict(state)
    if kind != "own states":
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    assert agree(comm, train(optimizer, model, rank, range(30, 40)))


def test_clearing_one_gradient_after_the_exchange_keeps_the_rest_correct(hvd, comm):
    """What was delivered in it is lost, as in any training, and nothing else."""
    model, rank = Given(torch.float64), comm.Get_rank()
    compression = hvs.Compression.topka(memory="momentum", density=0.05, dense_below=0)
    optimizer = wrap(model, compression, sgd(model, lr=1.0))
    lost = dict.fromkeys(model.parameters(), 0.0)
    for step in range(250):
        closure_of(optimizer, model, rank, step, Given.loss if step < 10 else nothing)()
        optimizer.synchronize()
        if step == 5 and comm.Get_size() > 1:
            part = optimizer.exchange.delivered_of[model.second]
            lost[model.second] = part.unit * float(part.part(part.handover.next).sum())
            model.second.grad = None
        with optimizer.skip_synchronize():
            optimizer.step()
    given = comm.allreduce(model.total(rank, *range(10))) / comm.Get_size()
    assert agree(comm, snapshot(model))
    expected = pytest.approx(10 * given - sum(lost.values()), rel=1e-6)
    assert everywhere(comm, comm.Get_size() == 1 or model.moved() == expected)  # one rank delivers nothing late


def nothing(model, rank, step):
    return 0 * model.loss(rank, step)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_state_of_the_exchange_is_loaded_as_a_copy_in_the_parameters_format(hvd, comm, make):
    rank, ends = comm.Get_rank(), []

    def loss(model, rank, step):
        generator = torch.Generator().manual_seed(100 * rank + step)
        return model(torch.randn(2, 4, 6, 6, generator=generator)).square().mean()

    def made():
        torch.manual_seed(3)
        model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        return model, wrap(model, SELECTED, make(model, lr=0.01, fused=True))

    model, optimizer = made()
    train(optimizer, model, rank, range(10), loss)
    states = [copy.deepcopy(one.state_dict()) for one in (model, optimizer)]
    exchange = optimizer.compression_state_dict()
    for _ in range(2):
        other, resumed = made()
        other.load_state_dict(states[0])
        resumed.load_compression_state_dict(exchange)
        resumed.load_state_dict(copy.deepcopy(states[1]))
        ends.append(train(resumed, other, rank, range(10, 20), loss))
    assert everywhere(comm, same(train(optimizer, model, rank, range(10, 20), loss), ends[0]))
    assert everywhere(comm, same(*ends))


def test_momentum_may_be_zero_for_some_steps_with_adam(hvd, comm):
    """Its first moment is then the gradient, and the exchange knows it."""
    model, rank = Given(torch.float64), comm.Get_rank()
    optimizer = wrap(model, SELECTED, adamw(model, lr=0.01))
    for step in range(12):
        optimizer.param_groups[0]["betas"] = (0.0 if step in (5, 6) else 0.9, 0.99)
        train(optimizer, model, rank, [step], Given.loss)
        for p, part in optimizer.exchange.delivered_of.items():
            held = part.unit * part.part(part.handover.held).view(p.shape)
            assert torch.allclose(optimizer.state[p]["exp_avg"], held, atol=1e-12)


def test_a_step_that_fails_leaves_the_param_groups_as_they_are_in_the_state(hvd, comm):
    model = mlp()
    optimizer = wrap(model, SELECTED, sgd(model, nesterov=True))
    train(optimizer, model, comm.Get_rank(), range(3))
    optimizer.param_groups[0]["lr"] = torch.tensor([0.1, 0.2])
    closure_of(optimizer, model, comm.Get_rank(), 3)()
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        optimizer.step()
    groups = optimizer.state_dict()["param_groups"]
    assert everywhere(comm, len(groups) == 1 and groups[0]["nesterov"] and len(groups[0]["params"]) == 6)
