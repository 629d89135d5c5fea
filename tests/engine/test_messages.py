"""Messages of a step: none is sent needlessly."""

from __future__ import annotations

import pytest
import torch
from laws import everywhere
from states import same
from training import agree, loss_of, mlp, snapshot, train, wrap

from horovod_sparse.config import parse
from horovod_sparse.transport import waiting
from horovod_sparse.transport.base import Request

pytestmark = pytest.mark.mpi


def build():
    """A model whose weights share a sparse bucket, and its biases a dense one."""
    model = mlp()
    return model, wrap(model, parse("topka:density=0.1,dense_below=60"))


def test_small_parameters_take_no_extra_round(hvd, comm):
    model, optimizer = build()
    for number in range(5):
        train(optimizer, model, comm.Get_rank(), [number])
        counted = optimizer.statistics()
    if comm.Get_size() > 1:
        assert everywhere(comm, [counted[f"{part}/rounds"] for part in ("total", "bucket0", "bucket1")] == [1, 0, 1])
    assert agree(comm, snapshot(model))


def test_a_step_without_backward_leaves_no_times_or_messages_behind(hvd, comm):
    model, optimizer = build()
    train(optimizer, model, comm.Get_rank(), range(4))
    kept = len(waiting._abandoned), len(Request._kept)
    optimizer.zero_grad()
    if comm.Get_size() > 1:
        with pytest.raises(RuntimeError, match="without backward"):
            optimizer.step()
    train(optimizer, model, comm.Get_rank(), [4])
    times = {name: value for name, value in optimizer.statistics().items() if "seconds" in name}
    assert everywhere(comm, all(0 <= value < 100 for value in times.values())), times
    assert everywhere(comm, (len(waiting._abandoned), len(Request._kept)) == kept)


def test_piggybacked_and_separate_messages_give_the_same_bits(hvd, comm, monkeypatch):
    (model, optimizer), (other, apart) = build(), build()
    worker = apart.exchange.worker
    monkeypatch.setattr(worker, "_together", lambda first: worker.buckets[first : first + 1])
    for number in range(6):
        for one, its in ((model, optimizer), (other, apart)):
            its.zero_grad()
            bad = float("nan") if number == 4 and comm.Get_rank() == 0 else 1.0  # in a step that is not applied
            (loss_of(one, comm.Get_rank(), number) * bad).backward()
            its.synchronize()
            with its.skip_synchronize():
                if number != 4:
                    its.step()
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert everywhere(comm, all(torch.equal(a.grad, b.grad) or a.grad.isnan().any() for a, b in pairs))
    assert everywhere(comm, all(map(torch.equal, snapshot(model), snapshot(other))))
    assert everywhere(comm, same(optimizer.compression_state_dict(), apart.compression_state_dict()))
