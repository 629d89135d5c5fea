"""At density 1 our optimizer is Horovod's, whatever a training script does with it."""

from __future__ import annotations

import logging

import pytest
import torch
from laws import everywhere
from states import same
from torch import nn
from training import (
    agree,
    assert_parity,
    averages,
    batch,
    loss_of,
    mlp,
    near,
    parity,
    settings,
    sgd,
    snapshot,
    train,
    wrap,
)

import horovod_sparse as hvs
from horovod_sparse.costs import accuracy
from horovod_sparse.frontends import mpi_members
from horovod_sparse.frontends.horovod import gradients

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))


def wrapped(wrapper, model, **arguments):
    """The model's SGD optimizer, wrapped."""
    return wrapper(sgd(model), named_parameters=model.named_parameters(), **arguments)


def every_torch_optimizer():
    """All that Horovod's own tests step through; LBFGS and SparseAdam are not supported there either."""
    left_out = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and kind not in left_out]
    # The first steps before its state exists, the second takes matrices only.
    quick = ("ASGD", "Muon", "AdamW")
    return [pytest.param(kind, marks=() if kind.__name__ in quick else pytest.mark.full) for kind in kinds]


@pytest.mark.parametrize("kind", every_torch_optimizer(), ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch(hvd, comm, kind):
    """Some layers without gradient on some ranks, a restart from rank 0's state, and on with training."""
    rank = comm.Get_rank()

    def build():
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 4, bias=False))
        return model, wrap(model, hvs.Compression.topka(**settings(density=0.2)), kind(model.parameters(), lr=0.01))

    def loss(model, rank, step):
        x, y = batch(rank, step)
        hidden = model[0](x)
        return (model[1](hidden) - y if rank == 0 else hidden).square().mean()

    model, optimizer = build()
    assert agree(comm, train(optimizer, model, rank, loss=loss))
    state = optimizer.state_dict()
    restarted, fresh = build()
    if rank == 0:
        restarted.load_state_dict(model.state_dict())
        fresh.load_state_dict(state)
    if state["state"]:  # Horovod broadcasts nothing where there is none
        fresh.param_groups[0]["lr"] = 0.01 if rank == 0 else 0.5
    hvd.broadcast_optimizer_state(fresh, root_rank=0)  # steps fresh optimizers, which moves ASGD's parameters
    hvd.broadcast_parameters(restarted.state_dict(), root_rank=0)
    assert everywhere(comm, fresh.param_groups[0]["lr"] == 0.01)
    assert everywhere(comm, same(snapshot(model), snapshot(restarted)))
    assert agree(comm, train(fresh, restarted, rank, range(2)))


@parity
def test_adam_without_named_parameters(wrapper, rank):
    model = mlp()
    return train(wrapper(torch.optim.Adam(model.parameters(), lr=0.01)), model, rank)


def test_step_after_synchronize_warns_and_exchanges_once(hvd, comm):
    model = mlp()
    optimizer = wrap(model)
    loss_of(model, comm.Get_rank(), 0).backward()
    optimizer.synchronize()
    reduced = [p.grad.clone() for p in model.parameters()]
    sent = optimizer.traffic.bytes_sent
    if comm.Get_size() > 1:
        with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
            optimizer.step()
        assert everywhere(comm, sent > 0)
    assert everywhere(comm, optimizer.traffic.bytes_sent == sent)
    assert everywhere(comm, same([p.grad for p in model.parameters()], reduced))


@pytest.mark.parametrize("through", ["optimizer", "model"])
@pytest.mark.parametrize("once", [True, False], ids=["once", "twice"])
def test_a_rank_without_backward_after_a_skipped_step_still_takes_part(hvd, comm, through, once):
    """A GradScaler skips step() after synchronize(); the next step must not be taken for synchronized already."""
    model, rank, ranks = mlp(), comm.Get_rank(), comm.Get_size()
    optimizer = wrap(model, EVERYTHING)
    if once or rank == 0:
        loss_of(model, rank, 0).backward()
    optimizer.synchronize()
    (optimizer if through == "optimizer" else model).zero_grad()
    if rank == 0:
        loss_of(model, rank, 1).backward()
    expected = comm.bcast([p.grad / ranks for p in model.parameters()] if rank == 0 else None)
    optimizer.step()
    if ranks > 1:
        assert everywhere(comm, near([p.grad for p in model.parameters()], expected))


def test_zero_grad_of_the_wrapped_optimizer_decides(hvd, comm):
    """One without arguments, which sets gradients to zero."""

    class Zeroing(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad(set_to_none=False)

    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model, optimizer=Zeroing(model.parameters(), lr=0.1))
    train(optimizer, model, rank, range(2))
    optimizer.zero_grad()
    assert everywhere(comm, all(not p.grad.any() for p in model.parameters()))


def test_zero_grad_during_an_exchange_is_refused(hvd, comm):
    model = mlp()
    optimizer = wrap(model)
    loss_of(model, comm.Get_rank(), 0).backward()
    if comm.Get_size() > 1:
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@parity
def test_two_optimizers_that_exchange_at_the_same_time(wrapper, rank):
    first, second = mlp(), mlp()
    optimizers = [
        wrapper(sgd(model), named_parameters=[(f"{name}.{key}", p) for key, p in model.named_parameters()])
        for name, model in (("first", first), ("second", second))
    ]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = batch(rank, step)
        order = (first, second) if rank % 2 else (second, first)
        sum((model(x) - y).square().mean() for model in order).backward()
        for optimizer in optimizers:
            optimizer.step()
    return snapshot(first, second)


class Embedded(nn.Module):
    """An embedding with sparse gradients below a dense layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(50, 6, sparse=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x, embed=True):
        if not embed:
            return self.head(x[:, :6])
        return self.head(self.words((x[:, 0].abs() * 10).long().clamp(max=49)))


@parity
def test_embeddings_with_sparse_gradients_that_are_exchanged_as_dense(wrapper, rank):
    model = Embedded()
    optimizer = wrapper(sgd(model, momentum=0), named_parameters=model.named_parameters(), sparse_as_dense=True)
    return train(optimizer, model, rank)


def test_an_embedding_unused_on_some_ranks_after_the_first_step(hvd, comm):
    """Horovod itself would hang here: the ranks without it would submit a dense gradient."""
    model, rank = Embedded(), comm.Get_rank()
    optimizer = wrap(model, EVERYTHING)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        (model(x, embed=step == 0 or rank == 0) - y).square().mean().backward()
        expected = comm.bcast(None if model.words.weight.grad is None else model.words.weight.grad.to_dense())
        optimizer.step()
        if step:
            got = model.words.weight.grad.to_dense()
            assert everywhere(comm, torch.allclose(got, expected / comm.Get_size()))


def test_a_step_that_fails_leaves_no_sparse_gradient_in_flight(hvd, comm):
    """Horovod refuses a name that is in use."""
    from horovod.torch import mpi_ops

    model, rank = Embedded(), comm.Get_rank()
    optimizer = wrap(model, EVERYTHING)
    train(optimizer, model, rank, steps=[0])
    optimizer.param_groups[0]["lr"] = "no number"
    loss_of(model, rank, 1).backward()
    if comm.Get_size() > 1:
        assert mpi_ops._handle_map
        with pytest.raises(ValueError, match="no number"):
            optimizer.step()
    assert everywhere(comm, not mpi_ops._handle_map)
    optimizer.param_groups[0]["lr"] = 0.1
    assert agree(comm, train(optimizer, model, rank, steps=[2, 3]))


@pytest.mark.parametrize("name", ["sum", "predivide", "2 groups", "lists of groups"])
def test_arguments(hvd, comm, name):
    def scenario(wrapper, rank):
        model = mlp()
        arguments = {
            "sum": {"op": hvd.Sum},
            "predivide": {"gradient_predivide_factor": 2.0},
            "2 groups": {"groups": 2},
            "lists of groups": {
                "groups": [[model[0].weight, model[4].weight], [model[2].weight, model[2].bias]],
            },
        }[name]
        return train(wrapped(wrapper, model, **arguments), model, rank)

    assert_parity(hvd, comm, scenario)


def test_num_groups_warns(hvd, comm):
    model = mlp()
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = wrap(model, num_groups=2)
    train(optimizer, model, comm.Get_rank(), steps=[0])


@pytest.mark.parametrize("used", [True, False])
def test_an_empty_parameter_may_have_a_dtype_that_horovod_does_not_know(hvd, comm, used):
    model = mlp()
    empty = nn.Parameter(torch.empty(0, 3, dtype=torch.bfloat16))
    model[2].register_parameter("empty", empty)
    train(wrap(model, EVERYTHING), model, comm.Get_rank(), loss=lambda *at: loss_of(*at) + used * empty.sum().float())
    assert everywhere(comm, comm.Get_size() == 1 or (empty.grad.shape == (0, 3) and empty.grad.dtype == torch.bfloat16))


def test_bfloat16_gradients_are_averaged_in_float32(hvd, comm):
    """Horovod 0.28 knows no bfloat16 on the CPU, so the reference is the sum in float32."""
    model = mlp(torch.bfloat16)
    optimizer = wrap(model, EVERYTHING)
    for step in range(2):
        optimizer.zero_grad()
        expected = averages(model, comm, step)
        loss_of(model, comm.Get_rank(), step).backward()
        optimizer.synchronize()
        for p, one in zip(model.parameters(), expected, strict=True):
            assert everywhere(comm, p.grad.dtype == torch.bfloat16)
            assert everywhere(comm, torch.allclose(p.grad.float(), one, rtol=2**-7, atol=1e-30))
        with optimizer.skip_synchronize():
            optimizer.step()


def test_gradients_that_are_not_contiguous_keep_their_layout(hvd, comm):
    """Horovod itself refuses them; its reference is the same model in the default layout."""

    def scenario(wrapper, rank):
        layout = torch.contiguous_format if wrapper is hvd.DistributedOptimizer else torch.channels_last
        torch.manual_seed(5)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 2, 4))
        model = model.to(memory_format=layout)
        optimizer = wrapped(wrapper, model)

        def loss(model, rank, step):
            x = torch.randn(8, 3, 4, 3, generator=torch.Generator().manual_seed(10 * rank + step))
            return model(x.to(memory_format=layout)).square().mean()

        train(optimizer, model, rank, range(2), loss)
        assert model[0].weight.grad.is_contiguous(memory_format=layout)
        return snapshot(model)

    assert_parity(hvd, comm, scenario)


def test_an_invalid_state_of_the_exchange_is_refused_with_its_keys(hvd, comm):
    model = mlp()
    optimizer = wrap(model)
    if comm.Get_size() > 1:
        with pytest.raises(ValueError, match=r"rank \d: .* has keys .'param_groups', 'state'.: load"):
            optimizer.load_compression_state_dict(optimizer.state_dict())


def test_lbfgs_cannot_join(hvd, comm):
    if comm.Get_size() == 1:
        return  # one rank exchanges nothing
    model = mlp()
    with pytest.warns(UserWarning, match="LBFGS"):
        optimizer = wrap(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match=r"rank \d: hvd.join\(\) cannot be used with LBFGS"):
        optimizer._join()


def test_process_sets(hvd, comm):
    """Even and odd ranks train on their own; a rank outside a set takes its own steps, as with Horovod."""
    ranks = comm.Get_size()
    chosen = [list(range(first, ranks, 2)) for first in range(min(2, ranks))]
    sets = [hvd.global_process_set if ranks == 1 else hvd.add_process_set(one) for one in chosen]
    mine = comm.Get_rank() % len(sets)

    def scenario(wrapper, rank):
        results = []
        for number, process_set in enumerate(sets):
            model = mlp()
            trained = train(wrapped(wrapper, model, process_set=process_set), model, comm.Get_rank())
            results += trained if number == mine else []
        return results

    assert_parity(hvd, comm.Split(mine), scenario)
    comm.Barrier()
    for process_set in sets:
        if process_set is not hvd.global_process_set:
            hvd.remove_process_set(process_set)


def test_horovods_own_compressors_give_horovods_own_optimizer(hvd, comm):
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvs.parse("none"), hvs.Compression.fp16):
        optimizer = wrap(mlp(), compression)
        assert optimizer._compression in (hvd.Compression.none, hvd.Compression.fp16)
        assert not hasattr(optimizer, "compression_state_dict")


def test_arguments_without_effect_on_horovods_own_optimizer_are_reported_once(hvd, comm, caplog):
    scaler = torch.amp.GradScaler("cpu")
    wrap(mlp(), hvd.Compression.none, grad_scaler=scaler, undoable=True, residual_unit="update")
    wrap(mlp(), hvd.Compression.none, grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    reports = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    named = ["grad_scaler, undoable, residual_unit" in report for report in reports]
    assert everywhere(comm, named == ([True] if comm.Get_rank() == 0 else []))


def test_the_class_is_the_wrapped_one_and_shows_its_compression(hvd, comm):
    optimizer = wrap(mlp(), EVERYTHING)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.compression == EVERYTHING


@pytest.mark.parametrize(("sleeps", "setting"), [(True, None), (False, None), (True, "1")])
def test_warns_once_when_oversubscribed(hvd, monkeypatch, caplog, sleeps, setting):
    waiting = mpi_members._private_world().waiting
    monkeypatch.setattr(waiting, "sleeps", sleeps)
    monkeypatch.setattr(waiting, "_observes", False)  # too few cores or other processes would let it sleep
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    if setting:
        monkeypatch.setenv("HOROVOD_CYCLE_TIME", setting)
    gradients._report_cycle_time.cache_clear()
    caplog.set_level(logging.INFO, "horovod_sparse")
    for _ in range(2):
        wrap(nn.Linear(3, 3))
    told = sum("HOROVOD_CYCLE_TIME=10" in message for message in caplog.messages)
    assert told == (sleeps and not setting and hvd.rank() == 0 and hvd.size() > 1)


class OwnStep(torch.optim.SGD):
    """Optimizer that may do anything with its gradients."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "adaptive"),
    [
        (torch.optim.SGD, False),
        (torch.optim.AdamW, True),
        (torch.optim.RMSprop, True),
        (OwnStep, True),
    ],
    ids=["SGD", "AdamW", "RMSprop", "own step"],
)
def test_with_adaptive_optimizers_more_sums_come_down(hvd, comm, monkeypatch, make, adaptive):
    monkeypatch.setattr(accuracy, "KEEP", 1)
    monkeypatch.setattr(accuracy, "KEEP_OF_RANKS", 2)
    p = torch.nn.Parameter(torch.zeros(1000))
    compression = hvs.parse("oktopk:density=0.01,keep=auto,memory=residual,dense_below=0,tau_threshold=1")
    optimizer = hvs.DistributedOptimizer(make([p], lr=0.1), [("p", p)], compression)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(4):  # then owners hold more than they may send
        optimizer.zero_grad()
        (p * torch.randn(1000, generator=generator)).sum().backward()
        optimizer.step()
    expected = 1000 if comm.size == 1 else 10 * (2 * comm.size if adaptive else 1)
    assert p.grad.count_nonzero() == expected


def test_what_a_failed_backward_pass_has_submitted_belongs_to_its_step(hvd, comm):
    """The ranks that did not fail take it, too. Before, neither zero_grad() nor another pass is accepted."""

    def fail(*_):
        raise KeyError("of the script")

    model, rank, ranks = mlp(), comm.Get_rank(), comm.Get_size()
    optimizer = wrap(model)
    failing = rank == ranks - 1
    for step in range(4):
        optimizer.zero_grad()
        handle = model[1].register_full_backward_hook(fail)
        if not failing or step % 2:
            handle.remove()
            loss_of(model, rank, step).backward()
        else:
            with pytest.raises(KeyError, match="of the script"):
                loss_of(model, rank, step).backward()
            handle.remove()
            if ranks > 1:
                with pytest.raises(AssertionError, match=rf"rank {rank}: .*before optimizer.step\(\)"):
                    optimizer.zero_grad()
        optimizer.step()
    assert agree(comm, snapshot(model))
    if ranks > 1:
        loss_of(model, rank, 4).backward()
        with pytest.raises(AssertionError, match=rf"rank {rank}: .*after a backward pass that failed, call step"):
            loss_of(model, rank, 5).backward()
