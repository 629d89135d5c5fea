"""Generators, buffers and users' data: all of it loads again without executing code."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from checkpointing import reseed
from torch import nn

from horovod_sparse.checkpoint.state import buffers, generators, require_loadable, set_generators


def draw():
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()  # noqa: NPY002


def test_generators_go_on_where_they_were():
    reseed(5)
    draw()
    file = io.BytesIO()
    torch.save(generators(), file)
    expected = draw()
    reseed(6)
    file.seek(0)
    set_generators(torch.load(file, weights_only=True))
    assert draw() == expected


def test_buffers_are_told_from_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert buffers(model, model.state_dict()).keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


class Anything:
    pass


def test_what_would_execute_code_is_named():
    require_loadable({"best": [1.0, torch.zeros(2), None, {"at": (1, "a")}], 3: nn.Parameter(torch.zeros(1))}, "data")
    with pytest.raises(ValueError, match=r"data\['best'\]\[1\]\['at'\] is of type .*Anything.*without executing code"):
        require_loadable({"best": [1.0, {"at": Anything()}]}, "data")
