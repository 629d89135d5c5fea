"""Laws of local steps exchanged in fragments and beside further steps, under mpirun and torchrun alike."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from combinations import halved
from laws import everywhere
from states import same
from training import (
    MEAN,
    Given,
    agree,
    conserved,
    loss_of,
    means,
    mlp,
    near,
    settings,
    sgd,
    snapshot,
    train,
    wrap_local,
)

import horovod_sparse as hvs
from horovod_sparse.checkpoint import Checkpoints

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))
STREAMS = {
    "today's round": {},
    "fragments": {"fragments": 3},
    "delay": {"delay": 2},
    "both": {"fragments": 2, "delay": 3},
    "mixed": {"fragments": 2, "delay": 2, "alpha": 0.5},
    "mixed at once": {"alpha": 0.75},
}
every_stream = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())


class Reference:
    """The same algorithm as one would write it with a dense allreduce: H = 4."""

    def __init__(self, comm, parameters, plain, outer, fragments=1, delay=0, alpha=1.0):
        self.comm, self.parameters, self.plain = comm, parameters, plain
        self.delay, self.alpha, self.count = delay, alpha, 0
        self.common = [p.detach().clone().requires_grad_() for p in parameters]
        self.base = [p.detach().clone() for p in parameters]
        nesterov = outer.nesterov and outer.momentum > 0
        self.outer = [
            torch.optim.SGD([p], lr=outer.lr, momentum=outer.momentum, nesterov=nesterov) for p in self.common
        ]
        sizes = [p.numel() for p in parameters]
        middles = [sum(sizes[:i]) + size / 2 for i, size in enumerate(sizes)]
        self.fragment = [int(fragments * middle / sum(sizes)) for middle in middles]
        self.ends = [(f + 1) * 4 // fragments for f in range(fragments)]
        self.flying = []

    @torch.no_grad()
    def step(self):
        self.plain.step()
        self.count += 1
        self.apply()
        for f, end in enumerate(self.ends):
            if (self.count - 1) % 4 + 1 == end:
                mine = [i for i, of in enumerate(self.fragment) if of == f]
                starts = {i: self.parameters[i].clone() for i in mine}
                mean = means(self.comm, [self.base[i] - starts[i] for i in mine]) if mine else []
                self.flying.append((self.count + self.delay, starts, dict(zip(mine, mean, strict=True))))
                self.apply()

    def apply(self):
        for _, starts, mean in [one for one in self.flying if one[0] <= self.count]:
            for i, difference in mean.items():
                self.common[i].grad = difference
                self.outer[i].step()
                moved = self.parameters[i] - starts[i]
                self.base[i] = starts[i] + self.alpha * (self.common[i] - starts[i])
                self.parameters[i].copy_(self.base[i] + moved)
        self.flying = [one for one in self.flying if one[0] > self.count]

    def zero_grad(self):
        self.plain.zero_grad()


@pytest.mark.parametrize(
    ("stream", "outer"), halved(STREAMS, [hvs.OuterSGD(), MEAN, hvs.OuterSGD(lr=0.5, nesterov=False)])
)
def test_at_density_1_parameters_are_those_of_an_independent_implementation(comm, stream, outer):
    """Local SGD and DiLoCo; steps taken during a delay are in the next difference, and once in the parameters."""
    rank, model, theirs = comm.Get_rank(), mlp(), mlp()
    inner, plain = (torch.optim.AdamW(one.parameters(), lr=0.02) for one in (model, theirs))
    optimizer = wrap_local(model, EVERYTHING, inner, outer=outer, **STREAMS[stream])
    reference = Reference(comm, list(theirs.parameters()), plain, outer, **STREAMS[stream])
    for number in range(5):
        steps = range(4 * number, 4 * number + 4)
        train(optimizer, model, rank, steps)
        train(reference, theirs, rank, steps)
        assert everywhere(comm, near(model.parameters(), theirs.parameters(), 2e-4))


@pytest.mark.parametrize(("spec", "stream"), halved(["topka:", "oktopk:tau_partition=2,tau_threshold=2,"], STREAMS))
def test_nothing_is_lost_in_hundreds_of_steps(comm, stream, spec):
    """Given is delivered plus residuals; a rank without a step, and parameters frozen on some ranks, change nothing."""
    rank, model, moved = comm.Get_rank(), Given(), 0.0
    compression = hvs.parse(f"{spec}density=0.05,dense_below=0,bucket_bytes=1200")
    optimizer = wrap_local(model, compression, sgd(model, lr=1.0, momentum=0), **STREAMS[stream])
    for number in range(4):
        frozen = (rank + number) % 3 == 0
        model.second.requires_grad_(not frozen)
        model.second.grad = None
        for step in range(50 * number, 50 * number + 50):
            train(optimizer, model, rank, [step], partial(scaled_loss, rate=2.0**-6))
            gradients = model.gradients(rank, step)
            moved += 2.0**-6 * sum(one.double().sum().item() for one in gradients[: 1 if frozen else 2])
        optimizer.synchronize()
        assert agree(comm, snapshot(model))
        assert conserved(comm, model, optimizer, moved, 0.02)
    assert everywhere(comm, comm.Get_size() == 1 or optimizer.statistics()["total/steps"] >= 40)


def scaled_loss(model, rank, step, rate):
    parameters = zip(model.parameters(), model.gradients(rank, step), strict=True)
    return rate * sum((p * gradient).sum() for p, gradient in parameters)


@every_stream
def test_common_parameters_are_the_same_on_all_ranks_whenever_a_fragment_was_applied(comm, stream):
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, None, sgd(model), outer=hvs.OuterSGD(), **stream)
    applied = 0
    for step in range(40):
        before = [fragment.transfer for fragment in optimizer.exchange.fragments]
        train(optimizer, model, rank, [step])
        for fragment, transfer in zip(optimizer.exchange.fragments, before, strict=True):
            if (transfer is not None or not stream) and fragment.transfer is None and fragment.common:
                assert agree(comm, [*fragment.common.values(), *fragment.velocity.values()])
                applied += 1
    assert everywhere(comm, applied >= 9 or not ({"delay"} & stream.keys()))
    optimizer.synchronize()
    assert agree(comm, snapshot(model))


def test_no_step_waits_for_the_others_before_the_delay_is_over(comm):
    """Rank 0 takes all steps up to the end of the delay before the others begin."""
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, EVERYTHING, delay=3)
    if rank == 0:
        train(optimizer, model, rank, range(6))
    comm.Barrier()
    train(optimizer, model, rank, range(6 if rank == 0 else 0, 9))
    optimizer.synchronize()
    assert agree(comm, snapshot(model))


@pytest.mark.parametrize(("stream", "step"), halved(STREAMS, [6, 9]))
def test_a_checkpoint_in_a_round_and_in_a_transfer_resumes_with_the_same_bits(comm, folder, stream, step):
    rank = comm.Get_rank()

    def prepare():
        model = mlp()
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        return model, wrap_local(model, None, inner, outer=hvs.OuterSGD(), **STREAMS[stream])

    model, optimizer = prepare()
    train(optimizer, model, rank, range(step))
    Checkpoints(folder).save(step, model=model, optimizer=optimizer)
    straight = train(optimizer, model, rank, range(step, 18))
    fresh, resumed = prepare()
    Checkpoints(folder).load(model=fresh, optimizer=resumed)
    assert everywhere(comm, same(train(resumed, fresh, rank, range(step, 18)), straight))


@every_stream
def test_loading_the_own_state_changes_nothing(comm, stream):
    """Though ``state_dict`` returns, as torch's does, no copies."""

    def walk(*, load):
        model = mlp()
        optimizer = wrap_local(model, EVERYTHING, outer=hvs.OuterSGD(), **stream)
        train(optimizer, model, comm.Get_rank(), range(4))
        optimizer.synchronize()
        if load:
            optimizer.load_state_dict(optimizer.state_dict())
        train(optimizer, model, comm.Get_rank(), range(4, 9))
        optimizer.synchronize()
        return snapshot(model)

    assert everywhere(comm, same(walk(load=True), walk(load=False)))


@every_stream
def test_a_parameter_that_is_frozen_with_its_gradient_stays_common(comm, stream):
    """By momentum and decay it moves on, on each rank by something else."""
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, EVERYTHING, torch.optim.AdamW(model.parameters(), lr=0.02), **stream)
    train(optimizer, model, rank, range(4))
    optimizer.synchronize()
    before = snapshot(model)[0]
    model[0].weight.requires_grad_(requires_grad=False)
    for step in range(4, 9):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, rank, step).backward()
        optimizer.step()
    optimizer.synchronize()
    assert agree(comm, snapshot(model))
    assert everywhere(comm, not same(before, snapshot(model)[0]))


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_what_is_in_flight_counts_once_when_a_round_becomes_shorter_than_its_delay(comm, alpha):
    rank, model = comm.Get_rank(), Given()
    optimizer = wrap_local(model, None, sgd(model, lr=1.0, momentum=0), delay=3, alpha=alpha)
    train(optimizer, model, rank, range(4), Given.loss)
    optimizer.local_steps = 1
    train(optimizer, model, rank, range(4, 9), Given.loss)
    optimizer.synchronize()
    assert agree(comm, snapshot(model))
    assert conserved(comm, model, optimizer, model.total(rank, *range(9)), 0.02)


@pytest.mark.parametrize("stream", [STREAMS["today's round"], STREAMS["delay"]], ids=["round", "delay"])
def test_parameters_that_join_later_with_different_values_are_reported(comm, stream):
    rank, model = comm.Get_rank(), mlp()
    late = torch.nn.Parameter(torch.full((3,), float(rank)))
    optimizer = wrap_local(model, EVERYTHING, **stream)
    train(optimizer, model, rank, range(4))
    optimizer.synchronize()
    optimizer.add_param_group({"params": [late]})
    if comm.Get_size() > 1:
        with pytest.raises(ValueError, match=rf"rank {rank}: start of .*broadcast_parameters"):
            train(optimizer, model, rank, range(4, 11), lambda *at: loss_of(*at) + late.sum())


@every_stream
def test_what_a_step_has_moved_before_it_failed_is_exchanged(comm, stream):
    rank, model = comm.Get_rank(), Given()
    optimizer = wrap_local(model, EVERYTHING, sgd(model, lr=1.0, momentum=0), **stream)
    hook = optimizer.register_step_post_hook(lambda *_: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        train(optimizer, model, rank, [0], Given.loss)
    hook.remove()
    optimizer.synchronize()
    assert agree(comm, snapshot(model))
    assert conserved(comm, model, optimizer, model.total(rank, 0))


def test_a_checkpoint_resumes_with_another_alpha(comm, folder):
    rank, model = comm.Get_rank(), mlp()
    optimizer = wrap_local(model, EVERYTHING, sgd(model, momentum=0), delay=2, alpha=0.5)
    train(optimizer, model, rank, range(9))
    Checkpoints(folder).save(9, model=model, optimizer=optimizer)
    fresh = mlp()
    resumed = wrap_local(fresh, EVERYTHING, sgd(fresh, momentum=0), delay=2)
    Checkpoints(folder).load(model=fresh, optimizer=resumed)
    resumed.param_groups[0]["lr"] = 0.0
    train(resumed, fresh, rank, range(9, 15))  # up to the application of the next exchange
    common = {p: values for fragment in resumed.exchange.fragments for p, values in fragment.common.items()}
    assert everywhere(comm, all(same(p.detach(), common[p]) for p in fresh.parameters()))


@every_stream
def test_fewer_ranks_take_over_common_parameters_and_residuals(comm, folder, stream):
    """What is in flight has been delivered; steps since the last exchange are dropped."""
    rank, ranks, model = comm.Get_rank(), comm.Get_size(), Given()
    optimizer = wrap_local(model, None, sgd(model, lr=1.0, momentum=0), **stream)
    train(optimizer, model, rank, range(10), Given.loss)
    Checkpoints(folder).save(10, model=model, optimizer=optimizer)
    fragments = optimizer.exchange.fragments
    left = sum(masses(optimizer)) if ranks > 1 else 0.0
    if ranks < 3:
        return
    left = comm.allreduce(left)
    common = {name: fragment.common[p] for fragment in fragments for p, name in fragment.names.items()}
    few = comm.Split(rank < 2)
    if rank < 2:
        fresh = Given()
        group = few if not hasattr(few, "transport") else group_of(2)
        resumed = wrap_local(fresh, None, sgd(fresh, lr=1.0, momentum=0), process_set=group, **stream)
        restored = Checkpoints(folder, process_set=group).load(model=fresh, optimizer=resumed)
        if not stream:
            assert everywhere(few, "the round in progress starts over: its 2 steps are dropped" in restored.notes)
        train(resumed, fresh, rank, [], Given.loss)
        resumed.exchange.begin()
        assert everywhere(few, same(dict(fresh.named_parameters()), common))
        assert everywhere(few, few.allreduce(sum(masses(resumed))) == pytest.approx(left, rel=1e-4))
        train(resumed, fresh, rank, range(10, 14), Given.loss)
        resumed.synchronize()
        assert agree(few, snapshot(fresh))
    elif hasattr(few, "transport"):
        group_of(2)
    comm.Barrier()


def group_of(ranks):
    return torch.distributed.new_group(list(range(ranks)))


def masses(optimizer):
    buckets = optimizer.exchange.state_dict()["buckets"]
    return [bucket["unit"] * bucket["memory"]["residual"].double().sum().item() for bucket in buckets]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fragments": 0}, "fragments must be .* from 1 to local_steps=4, not 0"),
        ({"fragments": 5}, "fragments must be .*, not 5"),
        ({"delay": 4}, "delay must be .* from 0 to local_steps - 1 = 3, not 4"),
        ({"delay": 1.5}, r"delay must be .*, not 1\.5"),
        ({"alpha": 0.0}, r"alpha must be .*, not 0\.0"),
        ({"alpha": "1"}, "alpha must be .*, not '1'"),
    ],
)
def test_a_setting_out_of_range_is_named(comm, given, message):
    with pytest.raises(ValueError, match=f"rank {comm.Get_rank()}: {message}"):
        wrap_local(mlp(), **given)


def test_settings_that_differ_between_ranks_are_named(comm):
    rank = comm.Get_rank()
    if comm.Get_size() > 1:
        with pytest.raises(ValueError, match=rf"rank {rank}: schedule .*fragments=\d, delay=0"):
            wrap_local(mlp(), fragments=1 + rank % 2)


@pytest.mark.parametrize("stream", [STREAMS["fragments"], STREAMS["delay"]], ids=["fragments", "delay"])
def test_ranks_that_synchronize_alone_are_named(comm, stream):
    rank, ranks, model = comm.Get_rank(), comm.Get_size(), mlp()
    if ranks == 1:
        return
    optimizer = wrap_local(model, EVERYTHING, local_steps=3, **{**stream, **{k: 1 for k in stream if k == "delay"}})

    def end_alone():
        train(optimizer, model, rank, [0, 1] if rank == 0 else range(5))
        optimizer.synchronize()

    with pytest.raises(RuntimeError, match=rf"rank {rank}: 1 of {ranks} ranks have called synchronize\(\)"):
        end_alone()


def test_muon_inside_in_2_bits(comm):
    """MuLoCo's optimizers, each in a LocalOptimizer of its own, with SparseLoCo's compression."""
    rank, model, compression = comm.Get_rank(), mlp(), hvs.Compression.sparseloco(dense_below=0)
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    others = [(name, p) for name, p in model.named_parameters() if p.ndim != 2]
    inner = [torch.optim.Muon([p for _, p in matrices], lr=0.02), torch.optim.AdamW([p for _, p in others], lr=0.01)]
    optimizers = [
        hvs.LocalOptimizer(one, named, 4, compression, fragments=2, delay=1)
        for one, named in zip(inner, (matrices, others), strict=True)
    ]

    def mean_loss():
        return sum(comm.allgather(loss_of(model, rank, 0).item())) / comm.Get_size()

    first = mean_loss()
    for step in range(24):
        model.zero_grad()
        loss_of(model, rank, step % 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.synchronize()
    assert agree(comm, snapshot(model))
    assert mean_loss() < 0.95 * first
