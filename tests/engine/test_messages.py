"""Messages of a step: those that need not be are not sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from laws import everywhere
from states import same
from training import agree, loss_of, mlp, snapshot, train, wrap

from horovod_sparse.config import parse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import Step
from horovod_sparse.transport.base import Transport

pytestmark = pytest.mark.mpi


@pytest.fixture
def rounds(monkeypatch):
    """Names of the collective calls, as they are made."""
    made = []
    for name in ("allgather_integers", "allreduce", "allgather", "broadcast"):
        method = getattr(Transport, name)
        monkeypatch.setattr(
            Transport, name, lambda self, *given, name=name, method=method: made.append(name) or method(self, *given)
        )
    return made


def build():
    """A model whose weights share a sparse bucket, and its biases a dense one."""
    model = mlp()
    return model, wrap(model, parse("topka:density=0.1,dense_below=60"))


def test_the_small_parameters_take_the_agreement_along(hvd, comm, rounds):
    model, optimizer = build()
    for number in range(3):
        rounds.clear()
        train(optimizer, model, comm.Get_rank(), [number])
        gathers = ["allgather"] if number else ["allgather", "allgather"]  # the first step does not know the lengths
        assert everywhere(comm, rounds == (["allreduce", *gathers] if comm.Get_size() > 1 else []))
    assert agree(comm, snapshot(model))


def test_two_messages_or_one_make_no_difference_to_the_bits(hvd, comm):
    (model, optimizer), (other, apart) = build(), build()
    if comm.Get_size() > 1:
        assert apart.exchange.worker._piggybacks == [True, False]
        apart.exchange.worker._piggybacks = [False] * 2
    for number in range(5):
        for one, its in ((model, optimizer), (other, apart)):
            its.zero_grad()
            bad = float("nan") if number == 2 and comm.Get_rank() == 0 else 1.0  # in a step that is not applied
            (loss_of(one, comm.Get_rank(), number) * bad).backward()
            its.synchronize()
            with its.skip_synchronize():
                if number != 2:
                    its.step()
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert everywhere(comm, all(torch.equal(a.grad, b.grad) or a.grad.isnan().any() for a, b in pairs))
    assert everywhere(comm, all(map(torch.equal, snapshot(model), snapshot(other))))
    assert everywhere(comm, same(optimizer.compression_state_dict(), apart.compression_state_dict()))


@pytest.mark.parametrize("facts", [[0, 3, 2**31 - 1, 2**20], [1, 1, 0, 0], [5, 2**11, 2**22 + 1, 2**33 - 1]])
def test_facts_that_a_dense_bucket_takes_along_are_exact(comm, transport, facts):
    bucket = pipeline_for(parse("dense"), 3, np.zeros(0, np.float32), transport)
    output = np.ones(3, np.float32)
    sums = bucket.run([(0, output)], [(0, output)], Step(), ahead=np.array(facts) * (comm.Get_rank() + 1) // 3)
    expected = sum(np.array(facts) * (rank + 1) // 3 for rank in range(comm.Get_size()))
    assert everywhere(comm, np.array_equal(sums, expected))
