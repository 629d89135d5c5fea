"""Clipping after the exchange: allowed where everything is sent, and otherwise reported once."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from laws import everywhere
from torch import nn
from training import closure_of, mlp, sgd
from trainings import FRONT_ENDS, WHOLE

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi


def clip(model, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_values(model, step):
    nn.utils.clip_grad_value_(model.parameters(), 0.003 + 0.001 * (step % 3))


def scale(model, step):
    """As a script that scales its loss by hand."""
    for p in model.parameters():
        p.grad.mul_(2.0 ** -(step // 3))


SELECTED = hvs.Compression.recommended(collective="topka", density=0.05, dense_below=100)
CASES = {
    "clipped": (SELECTED, clip, True),
    "without momentum": (hvs.Compression.topka(density=0.05, dense_below=100), clip, True),
    "by value": (SELECTED, clip_values, True),
    "scaled": (SELECTED, scale, False),
    "dense": (hvs.Compression.dense(dense_below=100), clip, False),
    "unchanged": (SELECTED, lambda model, step: None, False),
    "at density 1": (hvs.Compression.topka(memory="momentum", **WHOLE), clip, False),
}


def adamw(model):
    return torch.optim.AdamW(model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("make", [sgd, pytest.param(adamw, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES)
def test_gradients_that_are_clipped_after_a_selection_are_reported_once(
    hvd, group, comm, caplog, case, make, front_end
):
    compression, change, warns = CASES[case]
    model, rank = mlp(), comm.Get_rank()
    replica, optimizer = FRONT_ENDS[front_end](model, compression, make(model))
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        for step in range(12):
            closure_of(optimizer, replica, rank, step)()
            if front_end == "Horovod":
                optimizer.synchronize()
            change(model, step)
            with optimizer.skip_synchronize() if front_end == "Horovod" else nullcontext():
                optimizer.step()
    reports = [message for message in caplog.messages if "are clipped after the exchange" in message]
    assert everywhere(comm, len(reports) == (warns and rank == 0 and comm.Get_size() > 1))
