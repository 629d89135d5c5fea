"""Clipping after the exchange: allowed where everything is sent, and otherwise reported once."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from combinations import halved
from front_ends import start
from laws import everywhere
from torch import nn
from training import WHOLE, closure_of, loss_of, mlp

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi


def clip(model, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_values(model, step):
    nn.utils.clip_grad_value_(model.parameters(), 0.003 + 0.001 * (step % 3))


def clip_the_last_layer(model, step):
    nn.utils.clip_grad_norm_(model[4].parameters(), 0.001)


def clip_once(model, step):
    if step == 7:
        clip(model, step)


def clip_little(model, step):
    for p in model.parameters():
        p.grad.mul_(0.98 + 0.005 * (step % 3))


def divide(model, step):
    """As a script that accumulates gradients."""
    for p in model.parameters():
        p.grad.div_(3)


def divide_by_tokens(model, step):
    for p in model.parameters():
        p.grad.div_(100 + 7 * step)


def scale(model, step):
    """As a script that scales its loss by hand."""
    for p in model.parameters():
        p.grad.mul_(2.0 ** -(step // 3))


def enlarge(model, step):
    """As a script that divides gradients by their norm."""
    for p in model.parameters():
        p.grad.mul_(3 + step % 2)


SELECTED = hvs.Compression.recommended(collective="topka", density=0.05, dense_below=100)
BUCKETS = hvs.Compression.recommended(collective="topka", density=0.05, dense_below=0, bucket_bytes=1200)
CASES = {
    "clipped": (SELECTED, clip, True),
    "without momentum": (hvs.Compression.topka(density=0.05, dense_below=100), clip, True),
    "by value": (SELECTED, clip_values, True),
    "the last layer": (BUCKETS, clip_the_last_layer, True),
    "once": (SELECTED, clip_once, True),
    "a little": (SELECTED, clip_little, True),
    "by tokens": (SELECTED, divide_by_tokens, True),
    "divided": (BUCKETS, divide, False),
    "scaled": (SELECTED, scale, True),
    "normalized": (SELECTED, enlarge, True),
    "dense": (hvs.Compression.dense(dense_below=100), clip, False),
    "unchanged": (SELECTED, lambda model, step: None, False),
    "at density 1": (hvs.Compression.topka(memory="momentum", **WHOLE), clip, False),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_an_optimizer_that_has_stepped_is_not_taken_for_clipping(group, comm, caplog):
    """Adam's hooks change the gradients of its own parameters."""
    model, rank = mlp(), comm.Get_rank()
    optimizers = [torch.optim.AdamW(model[layer].parameters()) for layer in (0, 2)]
    replica = start("DDP", model, lambda _: optimizers, SELECTED).model
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        for step in range(12):
            model.zero_grad()
            loss_of(replica, rank, step).backward()
            for optimizer in optimizers if step % 2 else reversed(optimizers):
                optimizer.step()
    assert everywhere(comm, not any("are scaled after the exchange" in message for message in caplog.messages))


def test_a_single_rank_says_that_it_clips_each_optimizer_by_its_own_norm(group, comm, caplog):
    model, rank = mlp(), comm.Get_rank()
    optimizers = [torch.optim.SGD(model[layer].parameters(), lr=0.1, momentum=0.9) for layer in (0, 2)]
    compression = hvs.Compression.recommended(collective="topka", density=0.05, dense_below=100, max_norm=0.01)
    replica = start("DDP", model, lambda _: optimizers, compression).model
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        for step in range(3):
            model.zero_grad()
            loss_of(replica, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
    reports = [message for message in caplog.messages if "of each optimizer by their own norm" in message]
    assert len(reports) == (comm.Get_size() == 1)


@pytest.mark.parametrize("warns", [True, False], ids=["clipped", "unchanged"])
@pytest.mark.parametrize("front_end", ["Horovod", "DDP"])
def test_a_closure_may_clip(hvd, group, comm, caplog, front_end, warns):
    """Lightning always passes one."""
    model, rank = mlp(), comm.Get_rank()
    started = start(front_end, model, sgd, SELECTED)
    optimizer = started.optimizer

    def closure():
        loss = closure_of(optimizer, started.model, rank, 0)()
        if front_end == "Horovod":
            optimizer.synchronize()
        if warns:
            clip(model, 0)
        return loss

    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        for _ in range(12):
            optimizer.step(closure)
    reports = [message for message in caplog.messages if "are scaled after the exchange" in message]
    assert everywhere(comm, len(reports) == (warns and rank == 0 and comm.Get_size() > 1))
    assert all("divide the loss" in message and "max_norm" in message for message in reports)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "make", "front_end"), halved(CASES, [sgd, torch.optim.AdamW], ["Horovod", "DDP"]))
def test_gradients_that_are_scaled_after_a_selection_are_reported_once(hvd, group, comm, caplog, case, make, front_end):
    compression, change, warns = CASES[case]
    model, rank = mlp(), comm.Get_rank()
    started = start(front_end, model, make, compression)
    optimizer = started.optimizer
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        for step in range(12):
            closure_of(optimizer, started.model, rank, step)()
            if front_end == "Horovod":
                optimizer.synchronize()
            change(model, step)
            with optimizer.skip_synchronize() if front_end == "Horovod" else nullcontext():
                optimizer.step()
    reports = [message for message in caplog.messages if "are scaled after the exchange" in message]
    assert everywhere(comm, len(reports) == (warns and rank == 0 and comm.Get_size() > 1))
    assert all("divide the loss" in message and "max_norm" in message for message in reports)
