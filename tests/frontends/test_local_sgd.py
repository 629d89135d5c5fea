"""LocalOptimizer as scripts use it: schedulers, states, checkpoints, loss scales, ranks with fewer batches."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from checkpointing import reseed
from combinations import halved
from laws import everywhere
from states import same
from torch import nn
from training import (
    Given,
    agree,
    closure_of,
    conserved,
    loss_of,
    means,
    mlp,
    near,
    owed,
    settings,
    sgd,
    snapshot,
    train,
    wrap,
    wrap_local,
)

import horovod_sparse as hvs
from horovod_sparse.checkpoint import CheckpointError, Checkpoints

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))
ADAM, PLAIN = {"kind": torch.optim.AdamW}, {"kind": torch.optim.SGD}  # the latter's state is empty
MOMENTUM = {**PLAIN, "momentum": 0.9}
INNER = [ADAM, PLAIN, MOMENTUM]


def inner(model, kind, **more):
    return kind(model.parameters(), lr=0.05, **more)


class Training:
    """Dropout, batch normalization, a schedule, and a loss scale that grows, and overflows on one rank."""

    def __init__(self, rank, of=ADAM, **arguments):
        torch.manual_seed(3)
        self.rank = rank
        self.model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.Linear(24, 4))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2 + rank)
        optimizer = inner(self.model, **of)
        self.optimizer = wrap_local(
            self.model, None, optimizer, grad_scaler=self.scaler, **{"outer": hvs.OuterSGD(), **arguments}
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 7], gamma=0.5)
        self.states = {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler")}
        reseed(rank)

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(8, 12)).square().mean()
            self.scaler.scale(loss).backward()
            if step == 2 and self.rank == 0:
                self.model[0].weight.grad[0, 0] = float("inf")
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
        return self

    def bits(self):
        scale = torch.tensor(self.scaler.get_scale())
        return [*snapshot(self.model), *(one.clone() for one in self.model.buffers()), scale]


@pytest.mark.parametrize(("of", "step"), halved(INNER, [5, 7, 8]))
def test_a_resumed_checkpoint_is_bitwise_identical(hvd, comm, folder, of, step):
    """Also in the middle of a round, where parameters, optimizer and loss scale are each rank's own."""
    rank = comm.Get_rank()
    training = Training(rank, of).train(range(step))
    checkpoints = Checkpoints(folder)
    (checkpoints.async_save if step == 5 else checkpoints.save)(step, **training.states)
    saved = training.bits()
    straight = training.train(range(step, 19)).bits()
    resumed = Training(rank, of)
    restored = checkpoints.load(**resumed.states)
    assert everywhere(comm, restored.notes == ())
    assert everywhere(comm, same(resumed.bits(), saved))
    assert everywhere(comm, resumed.optimizer.local_step == step % 4)
    assert everywhere(comm, same(resumed.train(range(step, 19)).bits(), straight))
    assert everywhere(comm, resumed.optimizer.local_step == 3)
    resumed.optimizer.synchronize()
    assert agree(comm, snapshot(resumed.model))


@pytest.mark.parametrize(("frozen", "steps"), halved(["rank 0", "others"], [(0, 2), (4, 6), (5, 6)]))
def test_a_checkpoint_within_a_round_resumes_with_a_layer_frozen_on_some_ranks(hvd, comm, folder, frozen, steps):
    """A rank that has frozen it holds its common values, and another rank its own."""
    rank, checkpoints, (since, step) = comm.Get_rank(), Checkpoints(folder), steps

    def freeze(model):
        model[2].weight.requires_grad_((rank == 0) != (frozen == "rank 0"))
        model[2].weight.grad = None

    def prepare():
        model = mlp()
        return model, wrap_local(model, None, sgd(model), outer=hvs.OuterSGD())

    model, optimizer = prepare()
    train(optimizer, model, rank, range(since))
    freeze(model)
    saved = train(optimizer, model, rank, range(since, step))
    checkpoints.save(step, model=model, optimizer=optimizer)
    straight = train(optimizer, model, rank, range(step, 12))
    fresh, resumed = prepare()
    freeze(fresh)
    checkpoints.load(model=fresh, optimizer=resumed)
    assert everywhere(comm, same(snapshot(fresh), saved))
    assert everywhere(comm, same(train(resumed, fresh, rank, range(step, 12)), straight))
    assert agree(comm, straight)


def test_a_run_that_exchanged_gradients_continues_with_local_steps(hvd, comm, folder):
    """Residuals of gradients become residuals of the same update."""
    rank, given = comm.Get_rank(), 0.0
    for wrapper, steps in ((wrap, range(5)), (wrap_local, range(5, 13))):
        model = Given()
        optimizer = wrapper(model, None, sgd(model, lr=0.25, momentum=0))
        Checkpoints(folder).load(model=model, optimizer=optimizer)
        train(optimizer, model, rank, steps, Given.loss)
        given += 0.25 * model.total(rank, *steps)
        Checkpoints(folder).save(steps.stop, model=model, optimizer=optimizer)
    assert conserved(comm, model, optimizer, given, 1e-2)
    assert agree(comm, snapshot(model))


@pytest.mark.parametrize(
    ("of", "arguments", "steps", "begun"),
    [
        (ADAM, {"outer": hvs.OuterSGD()}, 8, 0),
        (PLAIN, {"outer": hvs.OuterSGD()}, 10, 2),
        (MOMENTUM, {"outer": hvs.OuterSGD()}, 10, 2),
        (ADAM, {"fragments": 2}, 6, 2),
        (ADAM, {"delay": 1}, 6, 0),
        (ADAM, {"fragments": 2, "alpha": 0.5}, 6, 0),
    ],
    ids=str,
)
def test_the_state_of_rank_0_reaches_new_ranks_by_horovods_broadcasts(hvd, comm, of, arguments, steps, begun):
    """The way of scripts that load on rank 0 alone: with momentum of the outer step and the place in the round."""
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, EVERYTHING, inner(model, **of), **arguments)
    train(optimizer, model, rank, range(steps))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    fresh = mlp()
    resumed = wrap_local(fresh, EVERYTHING, inner(fresh, **of), **arguments)
    if rank == 0:
        fresh.load_state_dict(states[0])
        resumed.load_state_dict(states[1])
    hvd.broadcast_parameters(fresh.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(resumed, root_rank=0)
    assert everywhere(comm, resumed.local_step == begun)
    if "outer" in arguments:
        momentum = [entry["outer_momentum"] for entry in resumed.state_dict()["state"].values()]
        assert agree(comm, momentum)
        assert everywhere(comm, all(one.any() for one in momentum))
    for number in range(4):
        train(resumed, fresh, rank, [steps + number])
        assert everywhere(comm, resumed.local_step == (begun + number + 1) % 4)
    resumed.synchronize()
    assert agree(comm, snapshot(fresh))


@pytest.mark.parametrize("end", ["synchronize", "join"])
@pytest.mark.parametrize("stream", [{"delay": 1}, {"fragments": 2, "alpha": 0.5}], ids=str)
def test_a_loaded_state_of_rank_0_is_common_if_the_first_call_is_an_exchange(hvd, comm, stream, end):
    """Without the steps of rank 0 since its last exchange, which all ranks would otherwise give."""
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, EVERYTHING, **stream)
    train(optimizer, model, rank, range(7))
    states = comm.bcast(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    common = [entry["common_parameter"].clone() for entry in states[1]["state"].values()]
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    optimizer.synchronize() if end == "synchronize" else hvd.join()
    assert everywhere(comm, same(snapshot(model), common) and optimizer.local_step == 0)


@pytest.mark.parametrize("stream", [{}, {"delay": 1}], ids=["", "delayed"])
def test_after_an_exchange_has_failed_on_a_rank_it_takes_no_further_steps(hvd, comm, stream):
    """Its residuals and parameters may differ from those of the ranks that have completed the exchange."""
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, None, local_steps=2, **stream)
    worker = optimizer._exchange.fragments[0].exchange.worker
    wait = worker.wait_for_results

    def fail():
        wait()
        raise MemoryError("for the test")

    if rank == 0:
        worker.wait_for_results = fail
        # Where the exchange is delayed, the next step may notice it before its end, which then raises the error itself.
        for call in (partial(train, optimizer, model, rank, range(3)), optimizer.synchronize):
            with pytest.raises((MemoryError, RuntimeError), match="for the test"):
                call()
        for call in (partial(train, optimizer, model, rank, [3]), optimizer.synchronize, optimizer.exchange.state_dict):
            with pytest.raises(RuntimeError, match=r"rank 0: .*MemoryError.*last checkpoint"):
                call()
    else:
        train(optimizer, model, rank, range(3))


def test_a_checkpoint_with_parameters_in_a_round_of_another_optimizer_is_refused(hvd, comm, folder):
    rank, model = comm.Get_rank(), mlp()
    halves = [wrap_local(half, None, sgd(half, momentum=0), local_steps=2) for half in (model[0], model[2])]
    checkpoints = Checkpoints(folder)
    for step in range(2):
        loss_of(model, rank, step).backward()
        for optimizer in halves:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            with pytest.raises(CheckpointError, match=r"rank \d: another LocalOptimizer has moved .*synchronize\(\)"):
                checkpoints.save(1, model=model, optimizer=halves[0])
            checkpoints.save(1, model=model[0], optimizer=halves[0])
    checkpoints.save(2, model=model, optimizer=halves[0])


def test_the_part_of_a_rank_in_a_checkpoint_holds_nothing_that_is_common(hvd, comm):
    """Though ``state_dict`` has added that to the same dictionaries."""
    model = mlp()
    optimizer = wrap_local(model, None, inner(model, **ADAM), outer=hvs.OuterSGD())
    train(optimizer, model, comm.Get_rank(), range(5))
    optimizer.state_dict()
    entries = optimizer.exchange.state_dict()["optimizer"]["state"].values()
    assert everywhere(comm, all(entry.keys() == {"step", "exp_avg", "exp_avg_sq"} for entry in entries))


def test_a_state_of_the_plain_optimizer_begins_a_round(hvd, comm):
    model = mlp()
    optimizer, plain = wrap_local(model, None, inner(model, **ADAM)), inner(model, **ADAM)
    train(plain, model, comm.Get_rank(), [0])
    train(optimizer, model, comm.Get_rank(), [0])
    optimizer.load_state_dict(plain.state_dict())
    assert everywhere(comm, optimizer.local_step == 0)


@pytest.mark.parametrize("steps", [0, 4, 6])
def test_loading_a_state_restores_the_optimizer(hvd, comm, steps):
    """With the outer momentum of that moment, or without any, and whatever has happened since."""
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, EVERYTHING, sgd(model), outer=hvs.OuterSGD())
    train(optimizer, model, rank, range(steps))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    straight = train(optimizer, model, rank, range(steps, 12))
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    train(optimizer, model, rank, range(4))  # the outer momentum is NaN, too
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    assert everywhere(comm, same(train(optimizer, model, rank, range(steps, 12)), straight))


def test_the_outer_momentum_of_a_frozen_parameter_is_saved_again_after_it_was_loaded(hvd, comm):
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, EVERYTHING, outer=hvs.OuterSGD())
    train(optimizer, model, rank, range(4))
    saved, fresh = copy.deepcopy(optimizer.state_dict()), mlp()
    fresh[0].weight.requires_grad_(False)
    resumed = wrap_local(fresh, EVERYTHING, outer=hvs.OuterSGD())
    resumed.load_state_dict(saved)
    momenta = [
        {at: entry["outer_momentum"] for at, entry in state["state"].items()} for state in (saved, resumed.state_dict())
    ]
    assert everywhere(comm, same(*momenta) and momenta[0][0].any())


@pytest.mark.parametrize(("stream", "fused", "clip"), halved([{}, {"delay": 1}], [False, True], [False, True]))
def test_a_step_skipped_by_a_scaler_on_one_rank_counts_and_adds_nothing(hvd, comm, fused, clip, stream):
    """Rounds end after the same number of calls; each rank has moved as far as with its plain optimizer."""
    rank = comm.Get_rank()

    def walk(optimizer, model):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            if step == 1 + rank % 3:  # in another step of each rank; torch's fused SGD cannot skip its first
                model[0].weight.grad[0, 0] = float("inf")
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return [*snapshot(model), torch.tensor(scaler.get_scale())]

    alone, model = mlp(), mlp()
    theirs = walk(sgd(alone, fused=fused), alone)
    optimizer = wrap_local(model, EVERYTHING, sgd(model, fused=fused), **stream)
    ours = walk(optimizer, model)
    if stream:
        optimizer.synchronize()
        ours[:-1] = snapshot(model)
    assert everywhere(comm, optimizer.local_step == 0)
    assert everywhere(comm, near(means(comm, theirs[:-1]), ours[:-1], 1e-5))
    assert everywhere(comm, torch.equal(ours[-1], theirs[-1]))
    assert agree(comm, snapshot(model))


def test_a_round_of_skipped_steps_changes_nothing(hvd, comm):
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, outer=hvs.OuterSGD())
    train(optimizer, model, rank, range(4))
    before, sent, left = snapshot(model), optimizer.traffic.bytes_sent, owed(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(4):
        optimizer.zero_grad()
        (scaler.scale(loss_of(model, rank, 0)) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    assert everywhere(comm, optimizer.local_step == 0 and same(before, snapshot(model)))
    assert everywhere(comm, optimizer.traffic.bytes_sent == sent and owed(optimizer) == left)


@pytest.mark.parametrize(
    "stream", [{}, {"fragments": 2}, {"fragments": 2, "delay": 3}, {"delay": 1, "alpha": 0.5}], ids=str
)
@pytest.mark.parametrize("spec", ["topka:density=0.05", "oktopk:density=0.05,tau_partition=2,tau_threshold=2"])
def test_ranks_with_fewer_batches_join_and_nothing_is_lost(hvd, comm, spec, stream):
    """What they have done in a round counts; then they follow, and so end with the parameters of all."""
    rank, model, given = comm.Get_rank(), Given(), 0.0
    compression = hvs.parse(f"{spec},dense_below=0,bucket_bytes=1200")
    optimizer = wrap_local(model, compression, sgd(model, lr=1.0, momentum=0), **stream)
    for epoch in range(3):
        steps = range(6 * rank + epoch)  # none at all on rank 0 at first
        train(optimizer, model, rank, steps, Given.loss)
        given += model.total(rank, *steps)
        last = hvd.join()
        assert everywhere(comm, last == comm.Get_size() - 1 and optimizer.local_step == 0)
        assert agree(comm, snapshot(model))
        assert conserved(comm, model, optimizer, given, 1e-2)


def test_ranks_join_with_two_optimizers_and_other_collectives_going_on(hvd, comm):
    """One exchanges gradients, two take rounds of other lengths."""
    rank = comm.Get_rank()
    models = [mlp(), mlp(), mlp()]
    optimizers = [wrap_local(models[0]), wrap_local(models[1], local_steps=3), wrap(models[2])]
    for step in range(2 + 5 * rank):
        for optimizer, model in zip(optimizers, models, strict=True):
            train(optimizer, model, rank, [step])
        hvd.allreduce(torch.ones(1), name="metric")
    hvd.join()
    assert agree(comm, snapshot(*models[:2]))


def test_schedulers_hooks_and_closures_belong_to_the_local_steps(hvd, comm):
    """A scheduler may be made before or after; a hook runs once a step."""
    rank, model = comm.Get_rank(), mlp()
    plain = sgd(model, momentum=0)
    before = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    optimizer = wrap_local(model, EVERYTHING, plain)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(optimizer.local_step))
    losses = [optimizer.step(closure_of(optimizer, model, rank)).item() for _ in range(5)]
    after.step()
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):  # of the plain one, torch means
        before.step()
    assert everywhere(comm, calls == [0, 1, 2, 3, 0] and losses[3] < losses[0])
    assert everywhere(comm, optimizer.param_groups[0]["lr"] == pytest.approx(0.025))
    assert isinstance(optimizer, torch.optim.SGD)


def test_param_groups_have_their_own_settings_and_may_be_added(hvd, comm):
    rank, model, late = comm.Get_rank(), mlp(), nn.Linear(4, 1)
    nn.init.ones_(late.weight)
    groups = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    optimizer = wrap_local(model, EVERYTHING, torch.optim.SGD(groups, lr=0.0))
    start = snapshot(model)
    train(optimizer, model, rank, range(2))
    optimizer.add_param_group({"params": [late.weight], "lr": 0.5})
    train(optimizer, model, rank, range(2, 4), lambda *at: loss_of(*at) + (rank + 1) * late.weight.sum())
    moved = [not torch.equal(one, other) for one, other in zip(start, model.parameters(), strict=True)]
    assert everywhere(comm, moved == [True, True, False, False, False, False])
    assert agree(comm, [*snapshot(model), late.weight.detach()])
    mean = (comm.Get_size() + 1) / 2
    assert everywhere(comm, torch.allclose(late.weight, torch.full((1, 4), 1 - 2 * 0.5 * mean)))


def refused(comm, match, **arguments):
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: .*{match}"):
        wrap_local(mlp(), **arguments)


@pytest.mark.parametrize(
    ("settings", "value"),
    [({"lr": 0}, "0"), ({"lr": float("nan")}, "nan"), ({"momentum": 1.0}, "1.0"), ({"momentum": -0.1}, "-0.1")],
)
def test_a_setting_of_the_outer_step_out_of_range_is_named(settings, value):
    with pytest.raises(ValueError, match=f"not {value}: .*DiLoCo"):
        hvs.OuterSGD(**settings)


def test_arguments_that_cannot_be_are_named_with_a_remedy(hvd, comm):
    refused(comm, "local_steps .* not 0", local_steps=0)
    refused(comm, "local_steps .* not 2.5", local_steps=2.5)
    integers = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    refused(comm, "int64", optimizer=torch.optim.SGD([integers]))


def test_arguments_that_differ_between_ranks_are_named(hvd, comm):
    rank = comm.Get_rank()
    if comm.Get_size() > 1:
        refused(comm, r"local_steps .*rank \d+ has \d", local_steps=4 + rank)
        refused(comm, r"outer .*lr=", outer=hvs.OuterSGD(lr=1 + rank))


@pytest.mark.parametrize("wrapper", ["stock", "distributed", "local"])
def test_a_wrapped_optimizer_is_refused(hvd, comm, wrapper):
    model = mlp()
    kinds = {"distributed": partial(wrap, model, None), "local": partial(wrap_local, model, None)}
    wrapped = kinds.get(wrapper, hvd.DistributedOptimizer)(sgd(model, momentum=0))
    for again in (wrap, wrap_local):
        with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: .*wrapped by a .*plain one"):
            again(model, None, wrapped)
    if wrapper in kinds:
        with pytest.raises(TypeError, match=r"cannot be copied.*state_dict\(\)"):
            copy.deepcopy(wrapped)
