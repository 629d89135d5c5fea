"""Fixtures for tests of checkpoints on every rank."""

from __future__ import annotations

import pytest
from checkpointing import Training

from horovod_sparse.checkpoint import Checkpoints


@pytest.fixture
def checkpoints(hvd, folder):
    return Checkpoints(folder)


@pytest.fixture
def run(hvd, comm):
    return Training("topka:density=0.05", comm.Get_rank()).train(1)
