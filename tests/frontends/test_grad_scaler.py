"""A step that a GradScaler skips has no effect, on any rank or bucket."""

from __future__ import annotations

import itertools

import pytest
import torch
from laws import everywhere
from states import same
from training import loss_of, mlp, snapshot, train, wrap

import horovod_sparse as hvs
from horovod_sparse.collectives import auto
from horovod_sparse.costs.formulas import Compute
from horovod_sparse.costs.network import Link

pytestmark = pytest.mark.mpi

# Every memory, and everything else that has a state.
CONFIGURATIONS = [
    "topkdsa:density=0.1,memory=momentum,momentum=0.5",
    "gtopk:density=0.1,memory=conef,compressor=quantize",
    "oktopk:density=0.1,memory=improved,version=2,compressor=quantize",
    "stable:density=0.25,block=4,refresh=2",
    "exdyna:density=0.1,blocks=16",
    "deft:density=0.1,wire=float16",
    "randomk:density=0.1,memory=partial,saving=0.5",
    "topka:density=0.1,sparsifier=reusedtopk,schedule=gravac,window=2",
    "gravac:cf_min=2,sparsifier=randomk,collective=shared,window=1,gain=accumulated,cf_max=1e6",
    "auto:density=0.1,schedule=accordion,interval=2",
    "hierarchical:density=0.1,inner=topka,outer=oktopk,node_ranks=2",
]
OVERFLOWS = 3  # the step in which one rank's gradient does


@pytest.fixture
def one_network(monkeypatch):
    """Two trainings measure twice, and auto might choose differently."""
    monkeypatch.setattr(auto, "measure_network", lambda *_: (Link(50e-6, 8e-9), None))
    monkeypatch.setattr(auto, "measure_compute", lambda transport, like: Compute(1e-9, 1e-9, 0.0, 1e-9))


class Training:
    """A model whose loss is scaled; every step may be made to overflow."""

    def __init__(self, comm, configuration, optimizer=torch.optim.SGD, **settings):
        self.rank = comm.Get_rank()
        self.model = mlp()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.optimizer = wrap(
            self.model,
            hvs.parse(f"{configuration},dense_below=0,bucket_bytes=1200"),
            optimizer(self.model.parameters(), lr=0.1, **settings),
            grad_scaler=self.scaler,
        )

    def step(self, number, overflow_in=None):
        """Run a step; the gradient of the named parameter becomes infinite."""
        self.optimizer.zero_grad()
        self.optimizer.set_epoch(number)
        loss = loss_of(self.model, self.rank, number)
        if overflow_in is not None:
            loss = loss + (self.model.get_parameter(overflow_in) * torch.inf).sum()
        self.scaler.scale(loss).backward()
        self.optimizer.synchronize()
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self):
        return [snapshot(self.model), self.optimizer.compression_state_dict()]


def twins(comm, steps):
    """Two trainings after the same steps."""
    pair = [Training(comm, "oktopk:density=0.1") for _ in range(2)]
    for number, one in itertools.product(range(steps), pair):
        one.step(number)
    return pair


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_skipped_step_changes_nothing(hvd, comm, configuration, one_network):
    """The overflow is in the last bucket: the others had been exchanged. The loss scale is halved in both runs."""
    here = "0.weight" if comm.Get_rank() == comm.Get_size() - 1 else None
    disturbed, undisturbed = Training(comm, configuration), Training(comm, configuration)
    for number in range(OVERFLOWS + 2):
        disturbed.step(number, here if number == OVERFLOWS else None)
        if number == OVERFLOWS:
            undisturbed.scaler.update(4.0)
        else:
            undisturbed.step(number)
    assert everywhere(comm, disturbed.scaler.get_scale() == 4.0)
    assert everywhere(comm, same(disturbed.state(), undisturbed.state()))


def test_a_failed_bucket_undoes_the_buckets_before_it_only(hvd, comm, monkeypatch):
    """The program catches the error and continues."""
    if comm.Get_size() == 1:
        return  # one rank has no buckets
    training, undisturbed = twins(comm, OVERFLOWS)
    first, failing, *later = training.optimizer._exchange.worker.buckets
    before = first.state_dict()

    def fails(vector, k):
        raise OSError("the network is down")

    with monkeypatch.context() as patched:
        patched.setattr(failing.pipeline.rules.collective, "allreduce", fails)
        with pytest.raises(OSError, match="the network is down"):
            training.step(OVERFLOWS)
    assert later
    assert everywhere(comm, not same(first.state_dict(), before))
    assert everywhere(comm, same(training.state(), undisturbed.state()))
    for one in (training, undisturbed):
        one.step(OVERFLOWS)
    assert everywhere(comm, same(training.state(), undisturbed.state()))


@pytest.mark.parametrize("steps", [0, OVERFLOWS])
def test_a_step_that_fails_before_it_begins_has_nothing_to_undo(hvd, comm, steps):
    """Also where the step before was applied; the learning rate is no number."""
    if comm.Get_size() == 1:
        return  # one rank has no buckets
    training, undisturbed = twins(comm, steps)
    (group,) = training.optimizer.param_groups
    group["lr"] = "no number"
    with pytest.raises((TypeError, ValueError)):
        training.step(steps)
    group["lr"] = 0.1
    for one in (training, undisturbed):
        one.step(steps)
    assert everywhere(comm, same(training.state(), undisturbed.state()))


def test_a_state_that_is_loaded_is_not_undone(hvd, comm):
    """Training goes back to a checkpoint right after a step that was skipped."""
    training = Training(comm, "oktopk:density=0.1")
    training.step(0)
    state = training.optimizer.compression_state_dict()
    training.step(1)
    training.step(2, "4.weight" if comm.Get_rank() == 0 else None)
    training.optimizer.load_compression_state_dict(state)
    assert everywhere(comm, same(training.optimizer.compression_state_dict(), state))


def test_a_scaler_that_is_switched_off_undoes_nothing(hvd, comm):
    """Scripts keep a disabled scaler for training in full precision, and may apply gradients without step()."""
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model, grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    train(optimizer, model, rank, [0])
    once = optimizer.compression_state_dict()
    loss_of(model, rank, 1).backward()
    optimizer.synchronize()
    assert comm.Get_size() == 1 or everywhere(comm, not same(once, optimizer.compression_state_dict()))
