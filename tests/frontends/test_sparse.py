"""Below density 1: nothing is lost over a whole training run, and every rank holds the same bits."""

from __future__ import annotations

import time

import pytest
from laws import everywhere
from states import same
from training import loss_of, mlp, train, wrap

pytestmark = pytest.mark.mpi


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
