"""Training steps inside of torch.compile: the bits of uncompiled ones, or an error on every rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import launch
import pytest
import torch
from front_ends import start
from training import mlp, settings

import horovod_sparse as hvs

TESTS = Path(__file__).parents[1]
OF_TORCH = "Compiled autograd is not compatible with C++ DDP Reducer"
COMPILED_BACKWARD = {"Horovod": "same", "local": "same", "DDP": OF_TORCH, "FSDP": "rank {}: FSDP2 does not reduce"}


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "front_end",
    [pytest.param(one, marks=() if one == "Horovod" else pytest.mark.nightly) for one in COMPILED_BACKWARD],
)
def test_compiled_steps_have_the_same_bits(front_end):
    """In programs that import the compiler; the tests themselves have a module in its place (tests/startup)."""
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    program = str(TESTS / "programs" / "compiled.py")
    done = launch.python(program, front_end, ranks=2, limit=180, PYTHONPATH=path)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert len(reports) == 2, done.stdout[-2000:] + done.stderr[-4000:]
    for report in reports:
        rank = report["rank"]
        assert (report["step"], report["whole"]) == ("same", "same")
        assert report["captures"] == (front_end != "DDP")  # backward passes that torch has compiled, with their hooks
        assert report["compiled backward"].startswith(COMPILED_BACKWARD[front_end].format(rank))
        assert not report["traced"]
        if front_end == "DDP":
            assert report["python_reducer"].startswith(f"rank {rank}: DDP passes single gradients to its hooks")


@pytest.mark.mpi
def test_ddps_reducer_in_python_is_refused_on_every_rank(group, comm):
    """DDP then passes gradient and parameter to its hooks."""
    sparse = hvs.Compression.topka(**settings())
    made = start("DDP", mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), sparse)
    p = next(made.model.parameters())
    with pytest.raises(RuntimeError, match=rf"rank {comm.Get_rank()}: .*python_reducer.*leave it at its default"):
        hvs.ddp.sparse_hook(made.exchange, (torch.zeros_like(p), p))
