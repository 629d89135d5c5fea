"""A step that a GradScaler skips might as well not have happened, on every rank and in every bucket."""

from __future__ import annotations

import pytest
import torch
from laws import everywhere
from states import same
from training import loss_of, mlp

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

CONFIGURATIONS = [
    "topka:density=0.1,sparsifier=reusedtopk",
    "topkdsa:density=0.1,memory=momentum,momentum=0.5",
    "gtopk:density=0.1,memory=conef,saving=0.5",
    "oktopk:density=0.1",
    "oktopk:density=0.1,memory=improved,version=2,compressor=quantize",
    "stable:density=0.25,block=4,refresh=2",
    "randomk:density=0.1,memory=partial,compressor=quantize",
    "topka:density=0.1,schedule=gravac,window=2",
    "oktopk:density=0.1,schedule=accordion,interval=2",
    "hierarchical:density=0.1,inner=topka,outer=oktopk,node_ranks=2",
]
OVERFLOWS = 3  # the step in which one rank's gradient does


class Training:
    """A model whose loss is scaled; every step may be made to overflow."""

    def __init__(self, comm, configuration, optimizer=torch.optim.SGD, **settings):
        self.rank = comm.Get_rank()
        self.model = mlp()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.optimizer = hvs.DistributedOptimizer(
            optimizer(self.model.parameters(), lr=0.1, **settings),
            named_parameters=self.model.named_parameters(),
            compression=hvs.parse(f"{configuration},dense_below=0,bucket_bytes=1200"),
            grad_scaler=self.scaler,
        )

    def step(self, number, overflow_in=None):
        """With the name of a parameter its gradient becomes infinite."""
        self.optimizer.zero_grad()
        self.optimizer.set_epoch(number)
        hooks = []
        if overflow_in is not None:
            parameter = self.model.get_parameter(overflow_in)
            hooks = [parameter.register_hook(lambda gradient: gradient * torch.inf)]
        self.scaler.scale(loss_of(self.model, self.rank, number)).backward()
        self.optimizer.synchronize()
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        for hook in hooks:
            hook.remove()

    def parameters(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def saved(self):
        return self.optimizer.compression_state_dict()


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_skipped_step_leaves_no_trace(hvd, comm, configuration):
    """The overflow is in the last bucket: the others had been exchanged. The loss scale is halved in both runs."""
    here = "0.weight" if comm.Get_rank() == comm.Get_size() - 1 else None
    disturbed, undisturbed = Training(comm, configuration), Training(comm, configuration)
    for number in range(6):
        disturbed.step(number, here if number == OVERFLOWS else None)
        if number == OVERFLOWS:
            undisturbed.scaler.update(4.0)
        else:
            undisturbed.step(number)
    assert everywhere(comm, disturbed.scaler.get_scale() == 4.0)
    assert everywhere(comm, same(disturbed.parameters(), undisturbed.parameters()))
    assert everywhere(comm, same(disturbed.saved(), undisturbed.saved()))


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"fused": True}), (torch.optim.SGD, {"fused": True})],
    ids=["not called", "fused Adam", "fused SGD"],
)
def test_what_is_saved_after_a_skipped_step_is_the_state_before_it(hvd, comm, optimizer, settings):
    """Also where step() is called all the same, and torch's kernel leaves the parameters as they are."""
    training = Training(comm, "oktopk:density=0.1", optimizer, **settings)
    for number in range(OVERFLOWS):
        training.step(number)
        before, parameters = training.saved(), training.parameters()
    training.step(OVERFLOWS, "4.weight" if comm.Get_rank() == 0 else None)
    assert everywhere(comm, same(training.parameters(), parameters))
    assert everywhere(comm, same(training.saved(), before))
    training.step(OVERFLOWS + 1)
    assert everywhere(comm, not same(training.parameters(), parameters))
    assert comm.Get_size() == 1 or everywhere(comm, not same(training.saved(), before))


def test_a_state_that_is_loaded_is_not_undone(hvd, comm):
    """Training goes back to a checkpoint right after a step that was skipped."""
    training = Training(comm, "oktopk:density=0.1")
    training.step(0)
    state = training.optimizer.compression_state_dict()
    training.step(1)
    training.step(2, "4.weight" if comm.Get_rank() == 0 else None)
    training.optimizer.load_compression_state_dict(state)
    assert everywhere(comm, same(training.saved(), state))


def test_a_scaler_that_is_switched_off_undoes_nothing(hvd, comm):
    """Scripts keep a disabled scaler for training in full precision, and may apply gradients without step()."""
    training = Training(comm, "topka:density=0.1")
    training.scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = mlp()
    optimizer = hvs.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=hvs.Compression.topka(0.1, dense_below=0),
        grad_scaler=training.scaler,
    )
    loss_of(model, comm.Get_rank(), 0).backward()
    optimizer.synchronize()
    once = optimizer.compression_state_dict()
    loss_of(model, comm.Get_rank(), 1).backward()
    optimizer.synchronize()
    assert comm.Get_size() == 1 or everywhere(comm, not same(once, optimizer.compression_state_dict()))
    assert comm.Get_size() == 1 or everywhere(comm, any(b["memory"]["residual"].any() for b in once["buckets"]))
