"""What scripts for stock Horovod do: gradients by hand, closures, clipping, joining, wrapping once more."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from laws import everywhere
from states import same
from torch import nn
from training import (
    Given,
    agree,
    assert_parity,
    averages,
    closure_of,
    conserved,
    loss_of,
    mlp,
    near,
    owed,
    parity,
    settings,
    sgd,
    snapshot,
    train,
    wrap,
)

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))


@parity
def test_gradients_assigned_by_hand(wrapper, rank):
    """No hook sees them."""
    model = mlp()
    optimizer = wrapper(sgd(model), named_parameters=model.named_parameters())
    for step in range(3):
        parameters = list(model.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss_of(model, rank, step), parameters), strict=True):
            p.grad = gradient
        optimizer.step()
    return snapshot(model)


def test_a_model_that_changes_its_precision_once_wrapped(hvd, comm):
    """Stock exchanges its gradients in the new one; only where every rank does it can be told."""

    def scenario(wrapper, rank):
        model = mlp()
        optimizer = wrapper(sgd(model), named_parameters=model.named_parameters())
        model.double()
        return train(optimizer, model, rank)

    assert_parity(hvd, comm, scenario, rtol=1e-3, atol=1e-5)  # our sums stay float32


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_is_its_manual_form(hvd, comm, search):
    """It decides by the loss, which differs from rank to rank: it is given the mean."""
    rank, results = comm.Get_rank(), []
    for manual in (True, False):
        model = mlp()
        optimizer = wrap(model, EVERYTHING, torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn=search))
        closure = closure_of(optimizer, model, rank)

        def by_hand(optimizer=optimizer, closure=closure):
            loss = closure()
            optimizer.synchronize()
            return comm.allreduce(loss.item()) / comm.Get_size()

        with optimizer.skip_synchronize() if manual else nullcontext():
            for _ in range(2):
                optimizer.step(by_hand if manual else closure)
        results.append(snapshot(model))
    assert agree(comm, results[1])
    assert everywhere(comm, all(map(torch.allclose, *results)))


def test_lbfgs_with_sparse_gradients_earns_a_warning_in_the_users_line(hvd, comm):
    model = mlp()
    with pytest.warns(UserWarning, match="LBFGS .*density=1") as caught:
        hvs.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters()), model.named_parameters(), hvs.Compression.topka(0.1)
        )
    assert everywhere(comm, caught[0].filename == __file__)


CHANGES = {
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "replace": lambda model: setattr(model[0].weight, "grad", model[0].weight.grad / 2),
    "forget": lambda model: model.zero_grad(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_changed_during_the_exchange_are_an_error(hvd, comm, change):
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model)
    loss_of(model, rank, 0).backward()
    CHANGES[change](model)
    if comm.Get_size() == 1:
        optimizer.step()  # they go nowhere
        return
    before = snapshot(model)
    message = rf"rank {rank}: the gradients of .* were changed between backward.*optimizer\.synchronize\(\) first"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert everywhere(comm, same(snapshot(model), before))
    assert agree(comm, train(optimizer, model, rank))


def reduced(model, optimizer, comm, step):
    """Whether an exchange gives every parameter that learns the mean gradient."""
    expected = averages(model, comm, step)
    closure_of(optimizer, model, comm.Get_rank(), step)()
    optimizer.synchronize()
    right = near([p.grad for p in model.parameters() if p.requires_grad], expected)
    with optimizer.skip_synchronize():
        optimizer.step()
    return everywhere(comm, right)


@pytest.mark.parametrize("named", [True, False])
def test_parameters_of_a_group_that_is_added_are_exchanged(hvd, comm, named):
    model = mlp()
    names = list(model.named_parameters()) if named else None
    optimizer = hvs.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), names, EVERYTHING)
    for step in range(2):
        for p in [*model[2].parameters(), *model[4].parameters()]:
            p.requires_grad_(False)
        assert reduced(model, optimizer, comm, step)
    model.requires_grad_(True)
    optimizer.add_param_group({"params": [*model[2].parameters(), *model[4].parameters()], "lr": 0.01})
    for step in range(3):
        assert reduced(model, optimizer, comm, step)
    assert agree(comm, snapshot(model))


def test_groups_that_differ_between_ranks_are_refused(hvd, comm):
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model[0], EVERYTHING)
    if comm.Get_size() > 1:
        with pytest.raises(ValueError, match=rf"rank {rank}: parameter differs between ranks"):
            optimizer.add_param_group({"params": [model[2].weight if rank else model[4].weight]})


def test_parameters_unfrozen_on_one_rank_are_exchanged_from_then_on(hvd, comm):
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = wrap(model, EVERYTHING)
    train(optimizer, model, comm.Get_rank())
    before = len(optimizer.compression_state_dict()["buckets"])
    if comm.Get_rank() == comm.Get_size() - 1:
        model[0].requires_grad_(True)
    train(optimizer, model, comm.Get_rank())
    assert agree(comm, snapshot(model))
    after = len(optimizer.compression_state_dict()["buckets"])
    assert everywhere(comm, (after > before) == (comm.Get_size() > 1))


def test_a_run_with_gradually_unfrozen_parameters_resumes(hvd, comm, tmp_path):
    """The script that goes on wraps the optimizer as the first one did."""

    def frozen():
        model = mlp()
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        return model, wrap(model)

    rank = comm.Get_rank()
    model, optimizer = frozen()
    for step, layer in enumerate([4, 2, 0]):
        model[layer].requires_grad_(True)
        train(optimizer, model, rank, [step])
    torch.save(optimizer.compression_state_dict(), tmp_path / "state")
    parameters, expected = snapshot(model), train(optimizer, model, rank, range(3, 6))
    other, restored = frozen()
    restored.load_compression_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for p, value in zip(other.parameters(), parameters, strict=True):
        p.data.copy_(value)
    other.requires_grad_(True)
    assert everywhere(comm, same(train(restored, other, rank, range(3, 6)), expected))


def test_an_unused_optimizer_is_not_waited_for_in_join(hvd, comm):
    """It may be gone on one rank, and here still."""
    rank = comm.Get_rank()
    kept = [wrap(mlp()), wrap(mlp())]
    model = mlp()
    kept.append(wrap(model, EVERYTHING))
    train(kept[-1], model, rank, range(2))
    if rank == 0:
        kept = kept[-1:]
    newest = mlp()
    optimizer = wrap(newest, EVERYTHING)
    train(optimizer, newest, rank, range(rank))  # none at all on rank 0
    hvd.join()
    everywhere(comm, True)
    for one in kept[:-1]:
        if comm.Get_size() > 1:
            assert one.exchange.worker._thread.submit(lambda: "free").result(5) == "free"


SPECS = [
    "oktopk:tau_partition=2,tau_threshold=2",
    "gtopk:memory=residual",
    "topka:schedule=accordion,interval=1,high_density=0.3",
    "topka:schedule=gravac,window=2,cf_step=1.5",
]


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_lost_while_ranks_have_joined(hvd, comm, spec):
    rank, model, steps = comm.Get_rank(), Given(), range(2 + 3 * comm.Get_rank())
    compression = hvs.parse(f"{spec},density=0.05,dense_below=0,bucket_bytes=1200")
    optimizer = wrap(model, compression, sgd(model, lr=1, momentum=0))
    for step in steps:
        optimizer.set_epoch(step // 2)  # which those that have joined are not told
        train(optimizer, model, rank, [step], Given.loss)
    # The last rank has taken all steps; the others' parameters stand still, but what they owe is theirs.
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
    assert conserved(comm, model, optimizer, model.total(rank, *steps))


@pytest.mark.parametrize("obstacle", ["grad_scaler", r"between backward\(\) and step"])
def test_where_joining_is_impossible_the_error_names_it(hvd, comm, obstacle):
    if comm.Get_size() == 1:
        return
    model = mlp()
    scaler = torch.amp.GradScaler("cpu") if obstacle == "grad_scaler" else None
    optimizer = wrap(model, grad_scaler=scaler)
    if scaler is None:
        loss_of(model, comm.Get_rank(), 0).backward()
    with pytest.raises(ValueError, match=rf"rank \d: hvd\.join\(\) .*{obstacle}"):
        hvd.join()
    if scaler is None:
        optimizer.step()


def test_a_model_whose_optimizer_is_made_anew_belongs_to_the_new_one(hvd, comm):
    model, rank = mlp(), comm.Get_rank()
    old = wrap(model, EVERYTHING)
    train(old, model, rank, [0])
    if comm.Get_size() == 1:
        return
    with pytest.warns(UserWarning, match="wrapped once more.*only the new optimizer") as caught:
        new = hvs.DistributedOptimizer(sgd(model), compression=EVERYTHING)
    assert everywhere(comm, caught[0].filename == __file__)
    sent = old.traffic.bytes_sent
    assert agree(comm, train(new, model, rank))
    assert everywhere(comm, old.traffic.bytes_sent == sent)
    with pytest.raises(RuntimeError, match=rf"rank {rank}: .*a newer one exchanges them"):
        old.step()
    del old
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(mlp(), EVERYTHING)


def test_an_error_of_the_exchange_names_the_users_line_first(hvd, comm):
    model = mlp()
    optimizer = wrap(model, hvs.Compression.topka(**settings(), schedule="accordion"))
    loss_of(model, comm.Get_rank(), 0).backward()
    if comm.Get_size() == 1:
        return
    with pytest.raises(RuntimeError, match=r"optimizer\.set_epoch") as caught:
        optimizer.step()
    assert everywhere(comm, owed(optimizer) == 0)
    frames = [str(entry.path) for entry in caught.traceback]
    assert everywhere(comm, frames[0] == __file__)
    assert everywhere(comm, not [path for path in frames if "concurrent" in path or "threading" in path])
