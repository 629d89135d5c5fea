"""Gradients that share memory, as views of one flat buffer (Megatron, apex, fairseq), and with it torch's version."""

from __future__ import annotations

import pytest
import torch
from laws import everywhere
from states import same
from torch import nn
from training import agree, loss_of, mlp, parity, settings, sgd, snapshot, wrap

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi
CHANGED = r"the gradients of .* were changed between backward"


def flatten(parameters, spare=0, dtype=torch.float32):
    """Make all gradients views of one buffer, each followed by some spare entries; return the buffer."""
    parameters = list(parameters)
    flat, start = torch.zeros(sum(p.numel() + spare for p in parameters), dtype=dtype), 0
    for p in parameters:
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel() + spare
    return flat


def own(parameters):
    """Make every gradient a buffer of its own."""
    parameters = list(parameters)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    return parameters


def trained(comm, lay_out, passes, synchronized, **more):
    model = mlp()
    lay_out(model.parameters())
    optimizer = wrap(model, hvs.Compression.topka(**settings(**more)), backward_passes_per_step=passes)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        for one in range(passes):
            loss_of(model, comm.Get_rank(), passes * step + one).backward()
        if synchronized:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize(
    ("spare", "passes", "synchronized", "more"),
    [
        (0, 1, True, {}),
        (0, 3, False, {}),
        (0, 1, False, {"density": 1.0}),
        (0, 3, True, {"dense_below": 10**6}),
        (5, 1, False, {"dense_below": 10**6}),
        (5, 3, True, {}),
    ],
)
def test_views_of_a_flat_buffer_train_like_other_gradients(hvd, comm, spare, passes, synchronized, more):
    ours = trained(comm, lambda parameters: flatten(parameters, spare), passes, synchronized, **more)
    assert agree(comm, ours)
    assert everywhere(comm, same(ours, trained(comm, own, passes, synchronized, **more)))


CHANGES = {
    "scale the buffer": lambda model, flat: flat.mul_(0.5),
    "change the gradient that was first": lambda model, flat: model[4].bias.grad.add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_backward_is_an_error(hvd, comm, change):
    model = mlp()
    optimizer, flat = wrap(model), flatten(model.parameters())
    loss_of(model, comm.Get_rank(), 0).backward()
    CHANGES[change](model, flat)
    before = snapshot(model)
    if comm.Get_size() > 1:
        with pytest.raises(RuntimeError, match=CHANGED):
            optimizer.step()
        assert everywhere(comm, same(snapshot(model), before))


def test_two_optimizers_share_a_buffer(hvd, comm):
    """The backward pass of the second changes the version of what the first exchanges; clearing one does so, too."""
    results = []
    for lay_out in (own, flatten):
        models = [mlp(), mlp()]
        lay_out(p for model in models for p in model.parameters())
        optimizers = [wrap(model) for model in models]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
            for model in models:
                loss_of(model, comm.Get_rank(), step).backward()
            for optimizer in optimizers:
                optimizer.step()
        results.append(snapshot(*models))
    assert everywhere(comm, same(*results))


class Concatenating(nn.Module):
    """Torch takes the gradients of both parts from one tensor, and adds those of later passes in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.one, self.other = (nn.Parameter(torch.randn(2, 12) / 4) for _ in range(2))

    def forward(self, x):
        return x @ torch.cat([self.one, self.other]).t()


@parity
def test_weights_that_the_model_concatenates(wrap, rank):
    model = Concatenating()
    optimizer = wrap(sgd(model), model.named_parameters(), backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        for one in range(2):
            loss_of(model, rank, 2 * step + one).backward()
        optimizer.step()
    return snapshot(model)
