"""Below density 1: nothing is lost over a whole training run, and every rank holds the same bits."""

from __future__ import annotations

import time

import pytest
import torch
from laws import everywhere
from states import same
from training import Given, conserved, loss_of, mlp, owed, sgd, train, wrap

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss scale"])
def test_every_gradient_is_in_the_parameters_or_in_a_residual(hvd, comm, dtype, scaled):
    """P * moved + sum of residuals as updates = sum of learning rate * gradients, whatever rate and loss scale do."""
    model, rank, given = Given(dtype), comm.Get_rank(), 0.0
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    optimizer = wrap(model, optimizer=sgd(model, lr=1.0, momentum=0), grad_scaler=scaler)
    scaler.scale(torch.zeros(1))  # creates its state
    for step, (rate, scale) in enumerate([(1.0, 8.0), (0.5, 8.0), (0.5, 2.0), (0.25, 16.0), (0.25, 16.0)]):
        optimizer.param_groups[0]["lr"] = rate
        if scaled:
            scaler.update(scale)
        optimizer.zero_grad()
        scaler.scale(model.loss(rank, step)).backward()
        given += rate * model.total(rank, step)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    assert conserved(comm, model, optimizer, given, 1e-4)
    assert comm.Get_size() == 1 or owed(optimizer) != 0  # or the test would show nothing


def test_a_state_of_another_model_is_refused(hvd, comm):
    optimizer = wrap(mlp())
    state = {"buckets": [{"parameters": ["elsewhere"]}]}
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: .*elsewhere.*load it with the model"):
        optimizer.load_compression_state_dict(state)


def test_a_state_damaged_in_its_last_bucket_changes_no_bucket(hvd, comm):
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model)
    train(optimizer, model, rank)
    damaged = optimizer.compression_state_dict()
    if comm.Get_size() == 1:
        return
    assert len(damaged["buckets"]) > 1
    damaged["buckets"][-1]["memory"]["residual"][0] = float("nan")
    train(optimizer, model, rank)
    before = optimizer.compression_state_dict()
    with pytest.raises(ValueError, match=rf"rank {rank}: .*residual.* not finite"):
        optimizer.load_compression_state_dict(damaged)
    assert everywhere(comm, same(optimizer.compression_state_dict(), before))


def test_residuals_and_statistics_are_not_read_during_an_exchange(hvd, comm):
    model = mlp()
    optimizer = wrap(model)
    loss_of(model, comm.Get_rank(), 0).backward()
    if comm.Get_size() > 1:
        with pytest.raises(RuntimeError, match="read it after step"):
            optimizer.compression_state_dict()
        with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
            optimizer.statistics()
    optimizer.step()
    optimizer.compression_state_dict()
    assert everywhere(comm, comm.Get_size() == 1 or optimizer.statistics()["total/steps"] == 1)


def test_the_exchange_runs_beside_the_backward_pass(hvd, comm, spans):
    """The first layer's gradient is not computed before the last layer's bucket has been exchanged."""
    if comm.Get_size() == 1:
        return
    model = mlp()
    optimizer = wrap(model)
    exchanged = []

    def wait(gradient):
        deadline = time.monotonic() + 30
        while not exchanged and time.monotonic() < deadline:
            time.sleep(0.001)
            exchanged.extend(span for span in spans() if span.name == "apply")

    model[0].weight.register_hook(wait)
    loss_of(model, comm.Get_rank(), 0).backward()
    assert everywhere(comm, bool(exchanged))
    on_a_thread = exchanged[0].thread.startswith("horovod_sparse")
    assert everywhere(comm, on_a_thread and exchanged[0].details["bucket"] == 0)
    optimizer.synchronize()
    assert everywhere(comm, {"select", "agree", "exchange", "apply"} <= {span.name for span in spans()})
